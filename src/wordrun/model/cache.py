"""Keys and values of tokens that a model has read, so that each new token costs its own pass alone.

Shapes: B sequences, M heads of keys, T tokens, H size of a head, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wordrun.model.base import Transformer


class Past:
    """What one block's attention keeps of the tokens before."""

    def __init__(self) -> None:
        self.length = 0
        self._kept: Tensor | None = None  # (2, B, M, capacity, H)

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
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
    """A model as ``generate`` wants it: tokens (B, T) to the logits of their successor (B, V).

    Tokens that begin as those of the last call did cost a pass of the new ones alone; others are read from their
    beginning. The model's weights must not change in the meantime.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.seen = torch.empty(0, 0, dtype=torch.long)
        self.pasts: list[Past] = []

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of the successor of ``tokens``."""
        known = self.seen.shape[1]
        if not (self.pasts and known < tokens.shape[1] and tokens[:, :known].equal(self.seen)):
            known, self.pasts = 0, [Past() for _ in self.model.blocks]
        self.seen = tokens
        return self.model(tokens[:, known:], at=-1, pasts=self.pasts)  # type: ignore[no-any-return]
