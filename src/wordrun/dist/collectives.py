"""Reductions of small tensors over ranks. Every rank of the group must call these."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum of ``values`` over the ranks of ``group``, the same on all of them."""
    total = values.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def all_mean(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the mean of ``values`` over the ranks of ``group``, the same on all of them."""
    return all_sum(values, group) / dist.get_world_size(group)


def all_min(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the minimum of each of ``values`` over the ranks of ``group``, the same on all of them."""
    least = values.detach().clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return least
