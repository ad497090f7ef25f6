"""Which sequence is the i-th of the run: a function of the seed and i alone, never of the number of ranks.

An epoch cuts the tokens into sequences of T, beginning at an offset that changes with the epoch, and visits
each once in shuffled order. The shuffle is a keyed bijection that is computed, not stored, so that it costs no
memory however long the corpus is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wordrun.data.shards import Tokens
from wordrun.errors import ConfigError

ROUNDS = 6  # 4 make a Feistel network of random functions a pseudo-random permutation (Luby and Rackoff 1988)
BLOCK = 4096  # places of the shuffle that are computed at once; NumPy is slow on a handful of numbers
Indices = NDArray[np.uint64]
Array = NDArray[np.integer] | Tokens


class Permutation:
    """A keyed bijection of 0 .. n - 1 in constant memory.

    A Feistel network over the smallest even number of bits that holds n; numbers that fall outside
    are sent round again until they fall inside (cycle walking, Black and Rogaway 2002).
    """

    def __init__(self, n: int, key: str) -> None:
        self.n = n
        half = max(1, (max(1, n - 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64(2**half - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the images of ``positions``, each in 0 .. n - 1."""
        values = self._encrypt(np.asarray(positions).astype(np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: Indices) -> Indices:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def _mix(x: Indices) -> Indices:
    """Return ``x`` with its bits stirred (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Batch:
    """B sequences: tokens and the tokens that should follow, both (B, T) int64."""

    tokens: Tensor
    targets: Tensor
    mark: int | None = None
    """The token that stands before each document, if attention is to stay within documents."""

    @classmethod
    def empty(cls, size: int, block_size: int, *, pinned: bool = False, mark: int | None = None) -> Batch:
        """Return a batch of ``size`` sequences that is still to be filled."""
        tokens, targets = (torch.empty(size, block_size, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
        return cls(tokens, targets, mark)

    @property
    def documents(self) -> Tensor | None:
        """Which document of its sequence each token belongs to, (B, T); None: attention goes over their ends."""
        return None if self.mark is None else (self.tokens == self.mark).cumsum(1)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; from pinned memory the copy does not hold up the host."""
        if device.type == "cpu":
            return self
        pinned = (t if t.is_pinned() else t.pin_memory() for t in (self.tokens, self.targets))
        tokens, targets = (t.to(device, non_blocking=True) for t in pinned)
        return Batch(tokens, targets, self.mark)


class Order(Protocol):
    """The training sequences of a run, by their index."""

    block_size: int
    per_epoch: int
    """Sequences of an epoch; of a mix, of its longest part."""

    def fill(self, first: int, batch: Batch) -> None:
        """Put the sequences from index ``first`` of the run on into ``batch``."""

    def batch(self, first: int, count: int) -> Batch:
        """Return the ``count`` sequences from index ``first`` of the run on; epochs follow each other without a gap."""

    def epoch_of(self, index: int) -> float:
        """Return how many epochs lie before sequence ``index``."""


class Sequences:
    """The training sequences of one corpus, by their index in the run.

    Args:
        tokens: of the corpus.
        block_size: T, the length of a sequence.
        seed: of the order.
        align: the token that stands before each document. A sequence then begins with the first one among its own
            tokens, if there is one, and goes on into those of the next.
    """

    def __init__(self, tokens: Array, block_size: int, seed: int, align: int | None = None) -> None:
        self.tokens, self.block_size, self.seed, self.align = tokens, block_size, seed, align
        # One less than fits, so that an epoch may begin at any offset below block_size.
        self.per_epoch = (len(tokens) - block_size) // block_size
        self._block: tuple[tuple[int, int], NDArray[np.int64]] = ((-1, 0), np.empty(0, np.int64))
        if self.per_epoch < 1:
            raise ConfigError(
                f"model.block_size={block_size} needs at least {2 * block_size} tokens, but the training text "
                f"has {len(tokens)}: use model.block_size={max(1, len(tokens) // 2)} or less, or more text"
            )

    def batch(self, first: int, count: int) -> Batch:
        """Return the ``count`` sequences from index ``first`` of the run on; epochs follow each other without a gap."""
        batch = Batch.empty(count, self.block_size)
        self.fill(first, batch)
        return batch

    def fill(self, first: int, batch: Batch) -> None:
        """Put the sequences from index ``first`` of the run on into ``batch``."""
        starts = self.starts(first, len(batch.tokens))
        if self.align is not None:
            starts = self._aligned(starts, self.align)
        fill(batch, self.tokens, starts)

    def epoch_of(self, index: int) -> float:
        """Return how many epochs lie before sequence ``index``."""
        return index / self.per_epoch

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Return where in the tokens the sequences that ``batch`` would cut begin, before they are aligned."""
        return np.concatenate([self._starts(e, at, n) for e, at, n in self._spans(first, count)])

    def _spans(self, first: int, count: int) -> list[tuple[int, int, int]]:
        spans = []
        while count:
            epoch, at = divmod(first, self.per_epoch)
            n = min(count, self.per_epoch - at, BLOCK - at % BLOCK)
            spans.append((epoch, at, n))
            first, count = first + n, count - n
        return spans

    def _starts(self, epoch: int, at: int, count: int) -> NDArray[np.int64]:
        block = at // BLOCK * BLOCK
        of, starts = self._block  # at once: another thread may be at work, too
        if of != (epoch, block):
            key = f"{self.seed}/{epoch}"
            offset = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % self.block_size
            places = np.arange(block, min(block + BLOCK, self.per_epoch))
            starts = offset + self.block_size * Permutation(self.per_epoch, key)(places)
            self._block = ((epoch, block), starts)
        return starts[at - block : at - block + count]

    def _aligned(self, starts: NDArray[np.int64], mark: int) -> NDArray[np.int64]:
        """Return ``starts``, each moved to the first ``mark`` of its sequence."""
        moves = (rows(self.tokens, starts, self.block_size) == mark).argmax(axis=1)  # 0 where there is none
        moved: NDArray[np.int64] = starts + moves
        return np.minimum(moved, len(self.tokens) - self.block_size - 1)


def rows(tokens: Array, starts: NDArray[np.int64], width: int) -> NDArray[np.integer]:
    """Return the ``width`` tokens from each of ``starts`` on, (len(starts), width)."""
    if isinstance(tokens, Tokens):
        return tokens.rows(starts, width)
    return np.stack([tokens[s : s + width] for s in starts.tolist()])


def fill(batch: Batch, tokens: Array, starts: NDArray[np.int64]) -> None:
    """Put the sequences that begin at ``starts``, and what follows each of their tokens, into ``batch``."""
    both = rows(tokens, starts, batch.tokens.shape[1] + 1)
    np.copyto(batch.tokens.numpy(), both[:, :-1], casting="unsafe")
    np.copyto(batch.targets.numpy(), both[:, 1:], casting="unsafe")


def cut(tokens: Array, starts: NDArray[np.int64], block_size: int, mark: int | None = None) -> Batch:
    """Return the sequences of ``block_size`` tokens that begin at ``starts``, with what follows each token."""
    batch = Batch.empty(len(starts), block_size, mark=mark)
    fill(batch, tokens, starts)
    return batch


class FixedSet:
    """A fixed choice of ``count`` (None: all) validation sequences, dealt to the ranks in turn.

    Every rank gets the same number of batches, so that evaluation may contain collectives; the last ones
    are filled up with sequences of weight 0. Of a mix each part counts as much as its share says.

    Args:
        tokens: of the validation text.
        block_size: T, the length of a sequence.
        batch_size: sequences of a batch.
        count: sequences in all.
        rank: this rank's place among those that share out the data.
        size: their number.
        mark: of documents within which attention is to stay.
        parts: of a mix the number of tokens and the share of each part of ``tokens``.
    """

    def __init__(
        self, tokens: Array, block_size: int, batch_size: int, count: int | None,
        rank: int = 0, size: int = 1, mark: int | None = None, parts: Sequence[tuple[int, float]] = (),
    ) -> None:  # fmt: skip
        starts, shares, begin = [], [], 0
        for length, share in parts or [(len(tokens), 1.0)]:
            whole = (length - 1) // block_size
            if whole < 1:
                raise ConfigError(
                    f"model.block_size={block_size} is longer than the validation text of {length} tokens: "
                    "use a smaller model.block_size, a larger data.val_fraction, or more text"
                )
            n = whole if count is None else min(whole, max(1, round(count * share)))
            starts.append(begin + np.arange(n, dtype=np.int64) * whole // n * block_size)  # spread evenly over the text
            shares.append(share)
            begin += length
        chosen = np.concatenate(starts)
        weights = [np.full(len(s), len(chosen) * share / len(s)) for s, share in zip(starts, shares, strict=True)]
        per_rank = -(-len(chosen) // (size * batch_size)) * batch_size
        mine = np.arange(per_rank, dtype=np.int64) * size + rank
        last = np.minimum(mine, len(chosen) - 1)
        self.weights = np.where(mine < len(chosen), np.concatenate(weights)[last], 0.0)
        self._starts = chosen[last]
        self._tokens, self._block_size, self._batch_size, self._mark = tokens, block_size, batch_size, mark

    def __len__(self) -> int:
        return len(self._starts) // self._batch_size

    def __getitem__(self, i: int) -> tuple[Batch, Tensor]:
        """Return the i-th batch of this rank and the weight of each of its sequences, 1 on average."""
        part = slice(i * self._batch_size, (i + 1) * self._batch_size)
        batch = cut(self._tokens, self._starts[part], self._block_size, self._mark)
        return batch, torch.from_numpy(self.weights[part])
