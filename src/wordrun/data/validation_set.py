"""The validation set: the same sequences at every evaluation and for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wordrun.common.errors import ConfigError
from wordrun.data.batch import Batch
from wordrun.data.pairs import PairSequences
from wordrun.data.shards import Array


def deal(count: int, batch_size: int, rank: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Deal ``count`` examples round-robin to ``size`` ranks, in the same number of batches to each.

    Returns:
        The examples of rank ``rank``, the last one repeated as padding, and whether each counts.
    """
    per_rank = -(-count // (size * batch_size)) * batch_size
    mine = np.arange(per_rank, dtype=np.int64) * size + rank
    return np.minimum(mine, count - 1), mine < count


class ValidationSet:
    """A fixed set of ``count`` (None: all) validation sequences, dealt to the ranks round-robin.

    Every rank gets the same number of batches, so evaluation may use collectives; the last batches are padded with
    sequences of weight 0. Each part of a mix is weighted by its share.

    Args:
        tokens: the validation tokens.
        block_size: T, the length of a sequence.
        batch_size: sequences per batch.
        count: total number of sequences.
        rank: this rank's index among the data-parallel ranks.
        size: number of data-parallel ranks.
        eot: the end-of-text token if attention is confined to documents.
        parts: for a mix, the number of tokens and the share of each part, in order.
        rows: for prompts and answers, their sequences, each weighted by its number of predicted tokens.
    """

    def __init__(
        self,
        tokens: Array,
        block_size: int,
        batch_size: int,
        count: int | None,
        rank: int = 0,
        size: int = 1,
        eot: int | None = None,
        parts: Sequence[tuple[int, float]] = (),
        rows: PairSequences | None = None,
    ) -> None:
        starts, shares, begin = [], [], 0
        for length, share in parts or [(len(tokens), 1.0)]:
            available = (length - 1) // block_size if rows is None else len(rows)
            if available < 1:
                raise ConfigError(
                    f"model.block_size={block_size} is longer than the validation text of {length} tokens: "
                    "use a smaller model.block_size, a larger data.val_fraction, or more text"
                )
            n = available if count is None else min(available, max(1, round(count * share)))
            spread = np.arange(n, dtype=np.int64) * available // n  # evenly spaced over the text
            starts.append(begin + spread * (block_size if rows is None else 1))
            shares.append(share)
            begin += length
        chosen = np.concatenate(starts)
        weights = [np.full(len(s), len(chosen) * share / len(s)) for s, share in zip(starts, shares, strict=True)]
        mine, counts = deal(len(chosen), batch_size, rank, size)
        self.weights = np.where(counts, np.concatenate(weights)[mine], 0.0)
        self._starts = chosen[mine]
        self._rows = rows
        self._tokens, self._block_size, self._batch_size, self._eot = tokens, block_size, batch_size, eot

    def __len__(self) -> int:
        return len(self._starts) // self._batch_size

    def __getitem__(self, i: int) -> tuple[Batch, Tensor]:
        """Return this rank's i-th batch and the weight of each of its sequences."""
        part = slice(i * self._batch_size, (i + 1) * self._batch_size)
        if self._rows is not None:
            batch, numbers = self._rows.empty(self._batch_size), self._starts[part]
            self._rows.fill(batch, numbers)
            counts = self._rows.counts(numbers)
            scale = self._block_size / torch.from_numpy(counts).clamp(min=1).float()
            return replace(batch, scale=scale), torch.from_numpy(self.weights[part] * counts)
        batch = Batch.empty(self._batch_size, self._block_size, eot=self._eot)
        batch.fill(self._tokens, self._starts[part])
        return batch, torch.from_numpy(self.weights[part])
