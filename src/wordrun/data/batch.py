"""Batches: the base class for any kind of examples, and batches of sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wordrun.data.shards import Array, Tokens


@dataclass(frozen=True)
class TensorBatch:
    """A batch of B examples: a dataclass of tensors and other values. The batch classes of all tasks derive from it."""

    def __len__(self) -> int:
        """Return B."""
        return len(next(iter(self.tensors().values())))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Self:
        """Return the batch on ``device``; copies from pinned memory do not block the host."""
        moved = {name: each.to(device, non_blocking=each.is_pinned()) for name, each in self.tensors().items()}
        return replace(self, **moved)

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the batch with its floating-point inputs in ``dtype``, the dtype of the weights.

        Only engines that do not use autocast need this. By default all floating-point tensors are cast.
        """
        cast = {name: each.to(dtype) for name, each in self.tensors().items() if each.is_floating_point()}
        return replace(self, **cast)


@dataclass(frozen=True)
class Batch(TensorBatch):
    """B sequences: input tokens and target tokens, both (B, T) int64."""

    tokens: Tensor
    targets: Tensor
    eot: int | None = None
    """The end-of-text token that precedes each document; set if attention is confined to documents."""
    scale: Tensor | None = None
    """Factor for each sequence's mean loss, () or (B,). T / predicted tokens makes it the mean over these alone."""
    pairs: Tensor | None = None
    """For each token, the number of its pair within the sequence, (B, T); set if attention is confined to pairs."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls, size: int, block_size: int, *, pinned: bool = False, eot: int | None = None) -> Batch:
        """Return an uninitialized batch of ``size`` sequences."""
        tokens, targets = (torch.empty(size, block_size, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
        return cls(tokens, targets, eot)

    def fill(self, tokens: Array, starts: NDArray[np.int64]) -> None:
        """Overwrite the batch with the sequences of ``tokens`` that start at ``starts``."""
        both = rows(tokens, starts, self.tokens.shape[1] + 1)
        np.copyto(self.tokens.numpy(), both[:, :-1], casting="unsafe")
        np.copyto(self.targets.numpy(), both[:, 1:], casting="unsafe")

    @property
    def documents(self) -> Tensor | None:
        """The document index of each token within its sequence, (B, T); None if attention ignores documents."""
        return self.pairs if self.eot is None else (self.tokens == self.eot).cumsum(1)

    def to(self, device: torch.device) -> Self:
        """Return the batch on ``device``; copies do not block the host."""
        if device.type == "cpu":
            return self
        pinned = {n: each if each.is_pinned() else each.pin_memory() for n, each in self.tensors().items()}
        moved: dict[str, Any] = {n: each.to(device, non_blocking=True) for n, each in pinned.items()}
        return replace(self, **moved)

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the batch unchanged: tokens are integers, and ``scale`` multiplies fp32 losses."""
        return self


def rows(tokens: Array, starts: NDArray[np.int64], width: int) -> NDArray[np.integer]:
    """Return ``width`` tokens starting at each of ``starts``, shape (len(starts), width)."""
    if isinstance(tokens, Tokens):
        return tokens.rows(starts, width)
    return np.stack([tokens[s : s + width] for s in starts.tolist()])
