"""Orthogonalizes matrices by Newton-Schulz iterations, for optimizers whose steps are orthogonal matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wordrun.model.base import Rows

Iteration = tuple[float, float, float]
"""Coefficients a, b, c of a X + b (X X') X + c (X X')^2 X."""


def orthogonalized(matrices: Sequence[Tensor], iterations: Sequence[Iteration]) -> list[Tensor]:
    """Return approximately U V' for each matrix U S V'; matrices of one shape, or its transpose, in one computation.

    Args:
        matrices: each (n, m); their dtype is that of the computation.
        iterations: the coefficients of each iteration.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for number, matrix in enumerate(matrices):
        shapes.setdefault(tuple(sorted(matrix.shape)), []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in shapes.values():
        wide = [matrices[i] if matrices[i].shape[0] <= matrices[i].shape[1] else matrices[i].mT for i in numbers]
        done = newton_schulz(torch.stack(wide), iterations)
        found |= {i: x if x.shape == matrices[i].shape else x.mT for i, x in zip(numbers, done, strict=True)}
    return [found[i] for i in range(len(matrices))]


def newton_schulz(x: Tensor, iterations: Sequence[Iteration]) -> Tensor:
    """Return the matrices ``x`` (B, n, m), n at most m, with singular values near 1 (Jordan et al. 2024)."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.dtype == torch.float32 and x.shape[2] >= 2 * x.shape[1]:
        return _by_gram(x, iterations)
    for a, b, c in iterations:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram(x: Tensor, iterations: Sequence[Iteration]) -> Tensor:
    """Return what ``newton_schulz`` does in half the time: all but two of its products are of n x n matrices.

    Each iteration multiplies X by a polynomial P of X X'. P commutes with X X', which becomes P X X' P. The squares in
    X X' cost half the digits of small singular values, which fp32 can spare and bf16 cannot.
    """
    gram, product = x @ x.mT, None
    for number, (a, b, c) in enumerate(iterations, start=1):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if number < len(iterations):
            gram = factor @ (factor @ gram)
    return x if product is None else product @ x


def divided(parameter: Tensor, rows: Rows) -> Tensor:
    """Return the matrices in ``parameter``, (kinds, heads * size, inputs), from rows ordered by head, then by kind."""
    flat = parameter.flatten(1)
    by_head = flat.view(rows.heads, rows.kinds, -1, flat.shape[1])
    return by_head.transpose(0, 1).reshape(rows.kinds, -1, flat.shape[1])


def joined(matrices: Tensor, rows: Rows, shape: torch.Size) -> Tensor:
    """Return the parameter of this ``shape`` from which ``divided`` made ``matrices``."""
    by_kind = matrices.view(rows.kinds, rows.heads, -1, matrices.shape[-1])
    return by_kind.transpose(0, 1).reshape(shape)


def cost(shape: Sequence[int], rows: Rows) -> float:
    """Return the operations of an iteration for a parameter of this ``shape``, which divides by ``rows``."""
    n, m = sorted((shape[0] // rows.kinds, math.prod(shape[1:])))
    return rows.kinds * (4.0 * n * n * m + 2.0 * n**3)
