"""The wrappers of ``compat`` for context parallelism: attention kernels, and collectives that torch has renamed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather_single(gathered: torch.Tensor, x: torch.Tensor, *, group: Any = None) -> Any:
    """Gather the tensors ``x`` of all ranks, one after the other along the first dimension; torch 2.13 renamed it."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, x, group=group)


def reduce_scatter_single(total: torch.Tensor, x: torch.Tensor, *, group: Any = None) -> Any:
    """Sum the tensors ``x`` of all ranks, and leave each an equal share of the rows; torch 2.13 renamed it."""
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(total, x, group=group)


def has_flash_attention(q: torch.Tensor) -> bool:
    """Return whether ``flash_attention`` works with queries like ``q``."""
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16))


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what torch's kernel for scaled_dot_product_attention computes, and the logarithms of its denominators.

    The public function does not return them. Tried with torch 2.8 and 2.13 on CPUs; not yet on CUDA.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def flash_attention_backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of q, k and v; ``out`` and ``lse`` may be of attention to more keys than ``k`` has."""
    aten, lse = torch.ops.aten, lse.mT.contiguous().mT if q.device.type == "cpu" else lse.contiguous()
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(d_out, q, k, v, out, lse, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    seed = torch.zeros((), dtype=torch.uint64, device=q.device)  # of dropout, which is not used
    return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        d_out, q, k, v, out.contiguous(), lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
    )
