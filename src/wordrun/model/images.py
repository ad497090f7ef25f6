"""Models that classify images: a small convolutional network, and torchvision's residual networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.common.errors import ConfigError
from wordrun.dist import torch_private_vision
from wordrun.model.base import Model
from wordrun.model.batch_norm import BatchNorm, SyncBatchNorm
from wordrun.model.options import ConvNetConfig, ResNetConfig

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda channels: nn.Identity(), "batch": BatchNorm, "sync": SyncBatchNorm,
}  # fmt: skip
SMALL = 64
"""Images of fewer pixels than this (height or width) get a residual network's small stem."""


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
        # A norm cancels a bias before it, whose gradients would be rounding errors, which AdamW turns into full steps.
        convolution = partial(nn.Conv2d, kernel_size=3, bias=cfg.norm == "none")
        self.features = nn.Sequential(
            convolution(inputs, first), norm(first), nn.ReLU(),
            convolution(first, second), norm(second), nn.ReLU(),
            nn.MaxPool2d(2), nn.Dropout(cfg.dropout), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(second * ((height - 4) // 2) * ((width - 4) // 2), cfg.hidden), nn.ReLU(),
            nn.Dropout(2 * cfg.dropout), nn.Linear(cfg.hidden, classes),
        )  # fmt: skip

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
        build = getattr(torch_private_vision.torchvision("models", f"model={cfg.name}"), f"resnet{cfg.depth}")
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
