"""Dropout that is fast on a CPU."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANCES = 2**16
"""On a CPU the probability is rounded to a multiple of 1 / CHANCES."""


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Return a mask with the shape of ``like``, True with probability 1 - p, from torch's default generator.

    One 64-bit draw covers four elements. On a CPU, this is 3 times as fast as the Bernoulli draws of ``F.dropout``,
    which took a quarter of a training step.
    """
    draws = torch.empty(math.ceil(like.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    return (draws.view(torch.int16)[: like.numel()] >= round(p * CHANCES) - CHANCES // 2).view(like.shape)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return ``x`` with elements zeroed with probability ``p`` and the others scaled by 1 / (1 - p)."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return x * (keep_mask(x, p) * torch.tensor(1 / (1 - p), dtype=x.dtype))


class Dropout(nn.Module):
    """``dropout`` in training, the identity in evaluation (Srivastava et al. 2014)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, with dropout while training; any shape."""
        return dropout(x, self.p) if self.training and self.p else x

    def extra_repr(self) -> str:
        """Return what repr shows."""
        return f"p={self.p}"
