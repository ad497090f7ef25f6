"""The wrapper of ``compat`` for mixtures of experts: torch's product of groups of rows with a matrix each.

Tried with torch 2.8 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Multiplies rows (N, C) by matrices (E, H, C), given how many rows belong to each (E,); the result is (N, H)."""


def grouped_product(x: Tensor, width: int, dtype: torch.dtype) -> Product:
    """Return the function that multiplies groups of rows like ``x`` (N, C), C and ``width`` wide, in ``dtype``.

    torch's ``grouped_mm`` has kernels for bf16 on CUDA from compute capability 8.0 on, and in torch 2.13 a path for
    CPUs. It needs rows of a multiple of 16 bytes.
    """
    aligned = all(size * dtype.itemsize % 16 == 0 for size in (width, x.shape[-1]))
    if not (aligned and hasattr(F, "grouped_mm") and len(x) and not x.is_meta):
        return one_by_one
    if x.device.type == "cpu":
        return grouped if torch.__version__ >= "2.13" else one_by_one
    fits = x.device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return grouped if fits else one_by_one


def grouped(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return the products by torch's ``grouped_mm``, without waiting for an accelerator."""
    ends = counts.cumsum(0).to(torch.int32)
    return F.grouped_mm(x, matrices.transpose(1, 2), offs=ends)


def one_by_one(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return the products, one matrix after the other."""
    groups = zip(torch.split(x, counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])
