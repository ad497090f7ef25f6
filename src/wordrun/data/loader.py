"""Which sequence is the i-th of the run: a function of the seed and i alone, never of the number of ranks.

An epoch cuts the tokens into sequences of T, beginning at an offset that changes with the epoch, and visits
each once in shuffled order. The shuffle is a keyed bijection that is computed, not stored, so that it costs no
memory however long the corpus is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wordrun.errors import ConfigError

ROUNDS = 6  # 4 make a Feistel network of random functions a pseudo-random permutation (Luby and Rackoff 1988)
BLOCK = 4096  # places of the shuffle that are computed at once; NumPy is slow on a handful of numbers
Indices = NDArray[np.uint64]


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

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; from pinned memory the copy does not hold up the host."""
        if device.type == "cpu":
            return self
        return Batch(*(t.pin_memory().to(device, non_blocking=True) for t in (self.tokens, self.targets)))


class Sequences:
    """The training sequences of one corpus, by their index in the run."""

    def __init__(self, tokens: NDArray[np.integer], block_size: int, seed: int) -> None:
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
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
        return cut(self.tokens, self.starts(first, count), self.block_size)

    def epoch_of(self, index: int) -> float:
        """Return how many epochs lie before sequence ``index``."""
        return index / self.per_epoch

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Return where in the tokens the sequences that ``batch`` would cut begin."""
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
        if self._block[0] != (epoch, block):
            key = f"{self.seed}/{epoch}"
            offset = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % self.block_size
            places = np.arange(block, min(block + BLOCK, self.per_epoch))
            order = Permutation(self.per_epoch, key)(places)
            self._block = ((epoch, block), offset + self.block_size * order)
        return self._block[1][at - block : at - block + count]


def cut(tokens: NDArray[np.integer], starts: NDArray[np.int64], block_size: int) -> Batch:
    """Return the sequences of ``block_size`` tokens that begin at ``starts``, with what follows each token."""
    windows = np.stack([tokens[s : s + block_size + 1] for s in starts.tolist()]).astype(np.int64)
    both = torch.from_numpy(windows)
    return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous())


class FixedSet:
    """A fixed choice of ``count`` (None: all) validation sequences, dealt to the ranks in turn.

    Every rank gets the same number of batches, so that evaluation may contain collectives; the last ones
    are filled up with sequences of weight 0.
    """

    def __init__(
        self, tokens: NDArray[np.integer], block_size: int, batch_size: int, count: int | None,
        rank: int = 0, size: int = 1,
    ) -> None:  # fmt: skip
        whole = (len(tokens) - 1) // block_size
        if whole < 1:
            raise ConfigError(
                f"model.block_size={block_size} is longer than the validation text of {len(tokens)} tokens: "
                "use a smaller model.block_size, a larger data.val_fraction, or more text"
            )
        count = whole if count is None else min(whole, count)
        chosen = np.arange(count, dtype=np.int64) * whole // count * block_size  # spread evenly over the text
        per_rank = -(-count // (size * batch_size)) * batch_size
        mine = np.arange(per_rank, dtype=np.int64) * size + rank
        self.weights = (mine < count).astype(np.float64)
        self._starts = chosen[np.minimum(mine, count - 1)]
        self._tokens, self._block_size, self._batch_size = tokens, block_size, batch_size

    def __len__(self) -> int:
        return len(self._starts) // self._batch_size

    def __getitem__(self, i: int) -> tuple[Batch, Tensor]:
        """Return the i-th batch of this rank and the weight of each of its sequences, 1 or 0."""
        part = slice(i * self._batch_size, (i + 1) * self._batch_size)
        return cut(self._tokens, self._starts[part], self._block_size), torch.from_numpy(self.weights[part])
