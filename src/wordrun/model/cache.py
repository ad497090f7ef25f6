"""KV cache: keys and values of the tokens so far, so that a new token costs a forward pass of that token only.

Shapes: B sequences, M heads of keys, T tokens, H size of a head, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wordrun.model.base import Transformer


class KVCache:
    """Keys and values of one block's attention."""

    def __init__(self) -> None:
        self.length = 0
        self._kept: Tensor | None = None  # (2, B, M, capacity, H)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, (B, M, T, H), and return those of all, (B, M, length, H)."""
        start, self.length = self.length, self.length + k.shape[2]
        if self._kept is None or self.length > self._kept.shape[3]:
            # Twice as much as needed: copies of what is there cost a token no more than its own keys and values do.
            longer = k.new_empty(2, *k.shape[:2], 2 * self.length, k.shape[3])
            if self._kept is not None:
                longer[:, :, :, :start] = self._kept[:, :, :, :start]
            self._kept = longer
        self._kept[0, :, :, start : self.length] = k
        self._kept[1, :, :, start : self.length] = v
        k, v = self._kept[:, :, :, : self.length]
        return k, v


class Cached:
    """Predicts the next token for ``generate``: tokens (B, T) to logits (B, V).

    Tokens that extend those of the last call cost a forward pass of the new ones only. The model's weights must not
    change between calls.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.tokens = torch.empty(0, 0, dtype=torch.long)
        self.caches: list[KVCache] = []

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of the successor of ``tokens``."""
        known = self.tokens.shape[1]
        if not (self.caches and known < tokens.shape[1] and tokens[:, :known].equal(self.tokens)):
            known, self.caches = 0, [KVCache() for _ in self.model.blocks]
        self.tokens = tokens
        return self.model(tokens[:, known:], at=-1, caches=self.caches)  # type: ignore[no-any-return]
