"""Models that classify images: a small convolutional network, and torchvision's residual networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.common.errors import ConfigError
from wordrun.dist import torch_private
from wordrun.dist.collectives import all_mean
from wordrun.model.base import Model
from wordrun.model.options import ConvNetConfig, ResNetConfig

SMALL = 64
"""Images with a height or width below this many pixels get a residual network's small stem."""


class Labeled(Protocol):
    """What a classifier reads of a batch."""

    @property
    def inputs(self) -> Tensor:
        """The images, (B, channels, height, width)."""

    @property
    def targets(self) -> Tensor:
        """The numbers of their classes, (B,) int64."""


class Classifier(Model):
    """A model whose outputs are the logits of classes, (B, classes)."""

    def losses(self, batch: Labeled) -> Tensor:
        """Return the cross entropy of each example in nats, (B,)."""
        logits = self(batch.inputs)
        return F.cross_entropy(logits.float(), batch.targets, reduction="none")

    def metrics(self, batch: Labeled, outputs: Tensor) -> dict[str, Tensor]:
        """Return for each example whether the likeliest class is the right one, (B,)."""
        return {"accuracy": outputs.argmax(1) == batch.targets}

    def initial_std(self, name: str) -> float:
        """Return He initialization's standard deviation, sqrt(2 / inputs of a neuron) (He et al. 2015)."""
        return math.sqrt(2 / math.prod(self.get_parameter(name).shape[1:]))


class ConvNet(Classifier):
    """Two 3x3 convolutions, 2x2 pooling, and two linear layers.

    Args:
        cfg: the model's options.
        shape: channels, height and width of the images.
        classes: number of classes.
    """

    def __init__(self, cfg: ConvNetConfig, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        inputs, height, width = shape
        if min(height, width) < 6:
            raise ConfigError(f"model={cfg.name} needs images of at least 6x6 pixels, not {height}x{width}")
        norm, first, second = NORMS[cfg.norm], cfg.channels, 2 * cfg.channels
        # No bias before a norm, which cancels it: AdamW would turn the rounding errors in its gradient into full steps.
        convolution = partial(nn.Conv2d, kernel_size=3, bias=cfg.norm == "none")
        self.features = nn.Sequential(
            convolution(inputs, first),
            norm(first),
            nn.ReLU(),
            convolution(first, second),
            norm(second),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(cfg.dropout),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(second * ((height - 4) // 2) * ((width - 4) // 2), cfg.hidden),
            nn.ReLU(),
            nn.Dropout(2 * cfg.dropout),
            nn.Linear(cfg.hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of ``images`` (B, channels, height, width)."""
        return self.classifier(self.features(images))  # type: ignore[no-any-return]


class ResNet(Classifier):
    """torchvision's residual network; each of its residual blocks is sharded, recomputed and compiled by itself.

    Args:
        cfg: the model's options.
        shape: channels, height and width of the images.
        classes: number of classes.
    """

    def __init__(self, cfg: ResNetConfig, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        build = getattr(torch_private.torchvision("models", f"model={cfg.name}"), f"resnet{cfg.depth}")
        net = build(num_classes=classes, norm_layer=NORMS[cfg.norm])
        convolution = partial(nn.Conv2d, shape[0], 64, bias=False)
        if cfg.stem == "small" or (cfg.stem == "auto" and min(shape[1:]) < SMALL):
            self.stem = nn.Sequential(convolution(kernel_size=3, padding=1), net.bn1, net.relu)
        else:
            first = convolution(kernel_size=7, stride=2, padding=3)
            self.stem = nn.Sequential(first, net.bn1, net.relu, net.maxpool)
        blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of ``images`` (B, channels, height, width)."""
        x = self.stem(images)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class BatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` whose weights may have 16 bits, as under DeepSpeed, beside statistics in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (B, C, H, W) normalized."""
        mean, variance = self.running_mean, self.running_var
        if mean is None or self.weight.dtype == mean.dtype:
            return super().forward(x)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
        weight, bias, share = self.weight.to(mean.dtype), self.bias.to(mean.dtype), self.momentum or 0.0
        return F.batch_norm(x, mean, variance, weight, bias, self.training, share, self.eps)


class SyncBatchNorm(BatchNorm):
    """Batch normalization with the statistics of all ranks: torch's SyncBatchNorm on accelerators, a mean on CPUs.

    torch's own does not support CPUs.
    """

    process_group = None
    """All ranks."""
    _check_non_zero_input_channels = torch_private.check_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (B, C, H, W) normalized; in training every rank must call this."""
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        if x.device.type != "cpu":
            return torch_private.sync_batch_norm(self, x)
        dims, shape = [0, 2, 3], [1, -1, 1, 1]
        wide = x.float()
        mean: Tensor = _AllMean.apply(wide.mean(dims))  # type: ignore[no-untyped-call]
        centered = wide - mean.view(shape)
        variance: Tensor = _AllMean.apply(centered.square().mean(dims))  # type: ignore[no-untyped-call]
        self._remember(mean, variance, x.numel() // x.shape[1] * dist.get_world_size())
        normal = centered * (variance + self.eps).rsqrt().view(shape)
        return (normal * self.weight.view(shape) + self.bias.view(shape)).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics, which evaluation uses; the running variance is the unbiased one."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_((variance * count / max(1, count - 1)).to(self.running_var.dtype), self.momentum)


class _AllMean(torch.autograd.Function):
    """The mean over all ranks; the gradient is the mean of the ranks' gradients."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return all_mean(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return all_mean(gradient)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda channels: nn.Identity(),
    "batch": BatchNorm,
    "sync": SyncBatchNorm,
}
"""Normalization layers, made for a number of channels, by the names that model.norm takes."""
