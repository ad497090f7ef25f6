"""KV cache: keys and values of earlier tokens, so that generating a token takes a forward pass of that token only.

Shapes: B sequences, N query heads, M key heads, T tokens, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from wordrun.model.attention import Mask, causal_attention


class KVCache:
    """Keys and values of one block's attention; the first block's also holds the last tokens, for n-grams."""

    length: int | Position
    """Number of tokens so far, which is the position of the next one."""

    def __init__(self, last: Tensor | None = None) -> None:
        self.length = 0
        self._last = last  # the last tokens, (B, n), which only ``with_earlier`` needs
        self._kept: Tensor | None = None  # keys and values, (2, B, M, capacity, H), of which ``length`` tokens are used

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values, (B, M, T, H), and return all keys and values, (B, M, length, H)."""
        assert isinstance(self.length, int)
        start, self.length = self.length, self.length + k.shape[2]
        if self._kept is None or self.length > self._kept.shape[3]:
            # Doubling the capacity keeps the copying cost per token constant.
            longer = k.new_empty(2, *k.shape[:2], 2 * self.length, k.shape[3])
            if self._kept is not None:
                longer[:, :, :, :start] = self._kept[:, :, :, :start]
            self._kept = longer
        self._kept[0, :, :, start : self.length] = k
        self._kept[1, :, :, start : self.length] = v
        return self.kept()

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, (B, M, length, H)."""
        assert self._kept is not None
        assert isinstance(self.length, int)
        k, v = self._kept[:, :, :, : self.length]
        return k, v

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, mask: Mask | None, scale: float | None, window: int | None
    ) -> Tensor:
        """Return the attention (B, N, T, H) of ``q`` to what ``append`` returned; see ``causal_attention``."""
        return causal_attention(q, k, v, p, mask, scale, window)

    def with_earlier(self, tokens: Tensor, count: int) -> Tensor:
        """Return ``tokens`` (B, T) after the last ``count`` tokens of earlier calls, or after zeros: (B, count + T)."""
        before = tokens.new_zeros(len(tokens), count) if self._last is None else self._last
        joined = torch.cat((before, tokens), 1)
        self._last = joined[:, joined.shape[1] - count :]
        return joined


class Position:
    """The number of tokens in the fixed caches of all blocks, on the device, so that a CUDA graph can count it up.

    Args:
        capacity: number of tokens for which the caches have room.
        length: number of tokens so far.
        device: the caches' device.
    """

    def __init__(self, capacity: int, length: int, device: torch.device) -> None:
        self.capacity = capacity
        self.value = torch.full((1,), length, device=device)
        self._shared: dict[object, tuple[Tensor, ...]] = {}

    def shared(self, key: object, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return ``make()``, which is computed once a step for all blocks that have the same ``key``."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def advance(self) -> None:
        """Count one token more, and forget what the blocks shared."""
        self._shared.clear()
        self.value += 1

    def visible(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what to add to the attention scores of the token at this position, (1, 1, 1, capacity).

        It hides the unused part of the cache, and what lies outside of the ``window``.
        """
        ahead = torch.arange(self.capacity, device=self.value.device) - self.value
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        return torch.zeros(self.capacity, dtype=dtype, device=ahead.device).masked_fill(hidden, -math.inf)[
            None, None, None
        ]


class FixedKVCache(KVCache):
    """Room for a fixed number of tokens, to which one token at a time is appended, always by the same kernels.

    Args:
        begun: has the tokens so far.
        length: their number, which all blocks share.
    """

    length: Position

    def __init__(self, begun: KVCache, length: Position) -> None:
        super().__init__(None if begun._last is None else begun._last.clone())
        self.length = length
        k, v = begun.kept()
        self._kept = k.new_zeros(2, *k.shape[:2], length.capacity, k.shape[3])
        self._kept[0, :, :, : k.shape[2]], self._kept[1, :, :, : k.shape[2]] = k, v

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one token, (B, M, 1, H), and return all, (B, M, capacity, H)."""
        assert self._kept is not None
        for kept, new in zip(self._kept, (k, v), strict=True):
            kept.index_copy_(2, self.length.value, new)
        return self.kept()

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, used and unused, (B, M, capacity, H)."""
        assert self._kept is not None
        return self._kept[0], self._kept[1]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, mask: Mask | None, scale: float | None, window: int | None
    ) -> Tensor:
        """Return the attention (B, N, 1, H) of one token's ``q``; the other arguments as in ``causal_attention``.

        The query heads that share a key head take the place of tokens, so that no keys are copied.
        """
        B, M, _, H = k.shape
        (seen,) = self.length.shared(window, lambda: (self.length.visible(window, q.dtype),))
        y = F.scaled_dot_product_attention(q.reshape(B, M, -1, H), k, v, seen, dropout_p=p, scale=scale)
        return y.reshape(q.shape)

    def grown(self, length: int) -> KVCache:
        """Return a cache of the first ``length`` tokens, all that there are, to which any number can be appended."""
        cache = KVCache(self._last)
        cache.append(*(each[:, :, :length] for each in self.kept()))
        return cache

    def with_earlier(self, tokens: Tensor, count: int) -> Tensor:
        """As in ``KVCache``; the last tokens are kept at one address."""
        kept = self._last
        joined = super().with_earlier(tokens, count)
        if kept is not None and self._last is not None:
            self._last = kept.copy_(self._last)
        return joined
