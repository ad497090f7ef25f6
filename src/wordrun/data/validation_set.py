"""The validation set: the same sequences at every evaluation and for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wordrun.common.errors import ConfigError
from wordrun.data.batch import Batch
from wordrun.data.pairs import PairSequences
from wordrun.data.shards import Array


def deal(count: int, batch_size: int, rank: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Deal ``count`` examples round-robin to ``size`` ranks, so that each gets the same number of batches.

    Returns:
        The numbers of the examples that ``rank`` gets, with the last example repeated as padding, and for each number
        whether it counts (False: padding).
    """
    per_rank = -(-count // (size * batch_size)) * batch_size
    mine = np.array(dealt(0, per_rank, rank, size), dtype=np.int64)
    return np.minimum(mine, count - 1), mine < count


def dealt(batch: int, batch_size: int, rank: int, size: int) -> range:
    """Return the numbers of the examples that ``deal`` gives ``rank`` in its ``batch``; padding has numbers, too."""
    first = batch * batch_size * size + rank
    return range(first, first + batch_size * size, size)


class ValidationData(Protocol):
    """Validation sequences by number."""

    def choose(self, count: int | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers and the weights of ``count`` (None: all) sequences, evenly spaced over the data."""

    def read(self, numbers: NDArray[np.int64]) -> tuple[Batch, NDArray[np.float64]]:
        """Return a batch of the sequences ``numbers``, and the factors by which their weights are multiplied."""


@dataclass(frozen=True)
class ValidationTokens:
    """Sequences of text, cut one after the other; the number of a sequence is the position of its first token."""

    tokens: Array
    block_size: int
    """T, the length of a sequence."""
    eot: int | None = None
    """The end-of-text token, if attention is confined to documents."""
    parts: Sequence[tuple[int, float]] = ()
    """For a mix, the number of tokens and the share of each data set, in order. The weights of its sequences have this
    share of all weights."""

    def choose(self, count: int | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        starts, shares, begin = [], [], 0
        for length, share in self.parts or [(len(self.tokens), 1.0)]:
            available = (length - 1) // self.block_size
            if available < 1:
                raise ConfigError(
                    f"model.block_size={self.block_size} is longer than the validation text of {length} tokens: "
                    "use a smaller model.block_size, a larger data.val_fraction, or more text"
                )
            n = available if count is None else min(available, max(1, round(count * share)))
            starts.append(begin + spread(n, available) * self.block_size)
            shares.append(share)
            begin += length
        chosen = np.concatenate(starts)
        weights = [np.full(len(s), len(chosen) * share / len(s)) for s, share in zip(starts, shares, strict=True)]
        return chosen, np.concatenate(weights)

    def read(self, numbers: NDArray[np.int64]) -> tuple[Batch, NDArray[np.float64]]:
        batch = Batch.empty(len(numbers), self.block_size, eot=self.eot)
        batch.fill(self.tokens, numbers)
        return batch, np.ones(len(numbers))


@dataclass(frozen=True)
class ValidationPairs:
    """Sequences of prompts and answers, each weighted by its number of predicted tokens."""

    pairs: PairSequences

    def choose(self, count: int | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        n = len(self.pairs) if count is None else min(len(self.pairs), max(1, count))
        return spread(n, len(self.pairs)), np.ones(n)

    def read(self, numbers: NDArray[np.int64]) -> tuple[Batch, NDArray[np.float64]]:
        batch = self.pairs.empty(len(numbers))
        self.pairs.fill(batch, numbers)
        predicted = self.pairs.counts(numbers)
        scale = self.pairs.block_size / torch.from_numpy(predicted).clamp(min=1).float()
        return replace(batch, scale=scale), predicted.astype(np.float64)


def spread(n: int, available: int) -> NDArray[np.int64]:
    """Return ``n`` evenly spaced numbers below ``available``, beginning with 0."""
    return np.arange(n, dtype=np.int64) * available // n


class ValidationSequences:
    """One rank's share of a fixed set of validation sequences, in batches.

    The sequences are dealt to the ranks round-robin. Every rank gets the same number of batches, so that an evaluation
    may use collectives; sequences of weight 0 fill up the last batches.

    Args:
        data: the sequences to choose from.
        batch_size: sequences per batch.
        count: number of sequences of all ranks together; None: all.
        rank: this rank's index among the data-parallel ranks.
        ranks: number of data-parallel ranks.

    Raises:
        ConfigError: the validation data are shorter than a sequence.
    """

    def __init__(self, data: ValidationData, batch_size: int, count: int | None, rank: int = 0, ranks: int = 1) -> None:
        chosen, weights = data.choose(count)
        mine, counts = deal(len(chosen), batch_size, rank, ranks)
        self.weights = np.where(counts, weights[mine], 0.0)
        self._data, self._numbers, self._batch_size = data, chosen[mine], batch_size

    def __len__(self) -> int:
        return len(self._numbers) // self._batch_size

    def __getitem__(self, i: int) -> tuple[Batch, Tensor]:
        """Return this rank's i-th batch and the weight of each of its sequences."""
        mine = slice(i * self._batch_size, (i + 1) * self._batch_size)
        batch, factors = self._data.read(self._numbers[mine])
        return batch, torch.from_numpy(self.weights[mine] * factors)
