"""Tensors of which ranks may hold shards: their shards, full values and means, and clipping gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wordrun.dist import torch_private


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if torch_private.is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor; all ranks that hold shards of it must call this."""
    return tensor.full_tensor() if torch_private.is_sharded(tensor) else tensor


def average(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Replace ``tensors`` by their means over the ranks of ``group`` (None: all), in one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def clip(parameters: Sequence[Tensor], norm: Tensor, most: float) -> None:
    """Scale down this rank's gradient shards if the ``norm`` of all gradients exceeds ``most``."""
    shards = [local(p.grad) for p in parameters if p.grad is not None]
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for device in {shard.device for shard in shards}:
        torch_private.scale([shard for shard in shards if shard.device == device], factor.to(device))
