"""Dropout that a CPU can afford."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANCES = 2**16
"""On a CPU the probability is rounded to this many parts."""


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Return a tensor of ``like``'s shape that is True with probability 1 - p, from torch's random stream.

    One 64-bit draw decides for four elements: 3 times as fast as the Bernoulli draws of ``F.dropout`` on a CPU, which
    took a quarter of a training step.
    """
    draws = torch.empty(math.ceil(like.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    return (draws.view(torch.int16)[: like.numel()] >= round(p * CHANCES) - CHANCES // 2).view(like.shape)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return ``x`` with elements zeroed with probability ``p`` and the others scaled by 1 / (1 - p)."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return x * (keep_mask(x, p) * torch.tensor(1 / (1 - p), dtype=x.dtype))


class Dropout(nn.Module):
    """``dropout`` in training, nothing in evaluation (Srivastava et al. 2014)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, with dropout while training; any shape."""
        return dropout(x, self.p) if self.training and self.p else x

    def extra_repr(self) -> str:
        """Return what repr shows."""
        return f"p={self.p}"


def causal_attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    """Return softmax(q k^T / sqrt(H)) v, each token attending to itself and those before, (B, N, T, H).

    Args:
        q: queries, (B, N, T, H).
        k: keys, (B, M, S, H): M divides N, and N / M heads of queries that follow each other share a head of keys. The
            queries are the last T of S tokens; T = S with dropout.
        v: values, (B, M, S, H).
        p: dropout probability of the attention weights.
    """
    by_hand = p > 0 and q.device.type == "cpu" and not torch.compiler.is_compiling()
    grouped = q.shape[1] != k.shape[1]
    if grouped and (by_hand or not _shares_heads(q)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    if not by_hand:
        T, S = q.shape[2], k.shape[2]
        # The last token sees all there are; a run of several at the end needs a mask of its own.
        seen = None if T in (1, S) else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        return F.scaled_dot_product_attention(q, k, v, seen, dropout_p=p, is_causal=T == S, enable_gqa=grouped)
    # torch's fused kernel for CPUs has no dropout, and what torch does in its place draws from Bernoulli.
    B, N, T, H = q.shape
    hidden = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(hidden, q.reshape(B * N, T, H), k.reshape(B * N, T, H).transpose(1, 2), alpha=H**-0.5)
    weights = dropout(torch.softmax(scores, dim=-1), p)
    return (weights @ v.reshape(B * N, T, H)).view(B, N, T, H)


def _shares_heads(q: Tensor) -> bool:
    """Say whether torch has a fused attention for ``q`` in which several heads of queries share one of keys.

    Of those for CUDA only the one for half precision has; the others would fall back to all T x T weights in memory.
    """
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16))
