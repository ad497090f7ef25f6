"""KV cache: keys and values of earlier tokens, so that generating a token takes a forward pass of that token only.

Shapes: B sequences, M key heads, T tokens, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one block's attention; the first block's also holds the last tokens, for n-grams."""

    def __init__(self) -> None:
        self.length = 0
        self._last: Tensor | None = None  # the last tokens, (B, n), which only ``with_earlier`` needs
        self._kept: Tensor | None = None  # keys and values, (2, B, M, capacity, H), of which ``length`` tokens are used

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values, (B, M, T, H), and return all keys and values, (B, M, length, H)."""
        start, self.length = self.length, self.length + k.shape[2]
        if self._kept is None or self.length > self._kept.shape[3]:
            # Doubling the capacity keeps the copying cost per token constant.
            longer = k.new_empty(2, *k.shape[:2], 2 * self.length, k.shape[3])
            if self._kept is not None:
                longer[:, :, :, :start] = self._kept[:, :, :, :start]
            self._kept = longer
        self._kept[0, :, :, start : self.length] = k
        self._kept[1, :, :, start : self.length] = v
        k, v = self._kept[:, :, :, : self.length]
        return k, v

    def with_earlier(self, tokens: Tensor, count: int) -> Tensor:
        """Return ``tokens`` (B, T) after the last ``count`` tokens of earlier calls, or after zeros: (B, count + T)."""
        before = tokens.new_zeros(len(tokens), count) if self._last is None else self._last
        joined = torch.cat((before, tokens), 1)
        self._last = joined[:, joined.shape[1] - count :]
        return joined
