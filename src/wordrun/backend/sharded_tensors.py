"""This rank's shard, or the full value, of a tensor that may be sharded over ranks (a DTensor)."""

from __future__ import annotations

from torch import Tensor

from wordrun.dist import torch_private


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if torch_private.is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor; all ranks that hold shards of it must call this."""
    return tensor.full_tensor() if torch_private.is_sharded(tensor) else tensor
