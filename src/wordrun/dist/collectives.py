"""Collectives for small tensors and plain values. Every rank of the group must call these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def all_sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum of ``values`` over the ranks of ``group``, the same on all of them."""
    return _reduced(values, dist.ReduceOp.SUM, group)


def all_mean(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the mean of ``values`` over the ranks of ``group``, the same on all of them."""
    return all_sum(values, group) / dist.get_world_size(group)


def average(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace ``tensors`` by their means over the ranks of ``group`` (None: all), in one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def all_min(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the minimum of each of ``values`` over the ranks of ``group``, the same on all of them."""
    return _reduced(values, dist.ReduceOp.MIN, group)


def all_max(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the maximum of each of ``values`` over the ranks of ``group``, the same on all of them."""
    return _reduced(values, dist.ReduceOp.MAX, group)


def all_rows(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the ``values``, (N,), of each rank of ``group``, (ranks, N), the same on all of them."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return values.detach().clone()[None]
    rows = values.new_empty(ranks, len(values))
    dist.all_gather(list(rows.unbind()), values.detach(), group=group)
    return rows


def _reduced(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return ``values`` combined by ``operation`` over the ranks of ``group``."""
    result = values.detach().clone()
    # A single rank would have to wait for a thread of gloo, which competes for a core with those that compute.
    if dist.get_world_size(group) > 1:
        dist.all_reduce(result, op=operation, group=group)
    return result


def gather_json(value: Any, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the ``value`` of every rank of ``group``, by rank; safer than torch's, which unpickles what it receives.

    Args:
        value: JSON-serializable.
        device: a device on which the group communicates.
        group: the ranks; None: all.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [json.loads(bytes(each[: int(n)].cpu().numpy())) for each, n in zip(found, sizes, strict=True)]


def first_text(text: str, device: torch.device | str = "cpu") -> tuple[int, str]:
    """Return the lowest rank whose ``text`` is not empty, and that text; -1 and "" if there is none.

    What is sent does not grow with the number of ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    first = int(all_min(torch.tensor(rank if text else size, device=device)))
    if first == size:
        return -1, ""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    length = torch.tensor(len(data), device=device)
    dist.broadcast(length, src=first)
    if rank != first:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=first)
    return first, bytes(data.cpu().numpy()).decode()
