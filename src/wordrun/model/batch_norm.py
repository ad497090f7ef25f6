"""Batch normalization: over the batches of all ranks, and with weights of 16 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.dist import torch_private
from wordrun.dist.collectives import all_mean


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
    """On accelerators, torch's SyncBatchNorm, which refuses CPUs; there, the ranks' statistics are averaged."""

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
