"""The training order: the i-th sequence of a run as a function of the seed and i alone.

It does not depend on the number of ranks. An epoch cuts the tokens into sequences of length T, starting at an offset
that changes with the epoch, and visits each once in shuffled order. The shuffle is a keyed bijection that is computed
rather than stored, so it takes no memory however long the corpus is.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wordrun.common.errors import ConfigError
from wordrun.config.schema import Config
from wordrun.data.batch import Batch, rows
from wordrun.data.corpus import Corpus
from wordrun.data.options import ANSWERED, MIX_PERIOD
from wordrun.data.pairs import PairSequences
from wordrun.data.shards import ANSWER, Array

ROUNDS = 6  # 4 rounds make a Feistel network a strong pseudo-random permutation (Luby and Rackoff 1988)
BLOCK = 4096  # positions of the shuffle computed at once; NumPy is slow on small arrays
Indices = NDArray[np.uint64]


class Permutation:
    """A keyed bijection of 0 .. n - 1 in constant memory.

    A Feistel network over the smallest even number of bits that holds n; values outside the range are encrypted again
    until they are inside (cycle walking, Black and Rogaway 2002).
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
            left, right = right, left ^ (_scramble(right + key) & self._mask)
        return (left << self._half) | right


def _scramble(x: Indices) -> Indices:
    """Return ``x`` with its bits mixed (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Order(ABC):
    """The training sequences of a run, by index; epochs follow each other without a gap."""

    block_size: int
    per_epoch: int
    """Sequences per epoch; for a mix, until every data set has been visited once."""
    document: int | None = None
    """The end-of-text token that precedes each document, if attention is confined to documents."""

    @property
    def unit(self) -> str:
        """What the examples are called in messages."""
        return f"sequences of model.block_size={self.block_size}"

    @abstractmethod
    def fill(self, first: int, batch: Batch) -> None:
        """Overwrite ``batch`` with the run's sequences starting at index ``first``."""

    def scale(self, first: int, count: int) -> float:
        """Return the factor for the mean losses of ``count`` sequences from index ``first``."""
        return 1.0

    def empty(self, size: int, *, pinned: bool = False) -> Batch:
        """Return an uninitialized batch of ``size`` sequences."""
        return Batch.empty(size, self.block_size, pinned=pinned, eot=self.document)

    def batch(self, first: int, count: int) -> Batch:
        """Return ``count`` sequences of the run starting at index ``first``."""
        batch = self.empty(count)
        self.fill(first, batch)
        return batch


class Sequences(Order):
    """The training sequences of one corpus.

    Args:
        tokens: the corpus.
        block_size: T, the length of a sequence.
        seed: random seed of the order.
        align: the end-of-text token that precedes each document. Each sequence is then shifted to begin at its first
            end-of-text token, if it has one, and extends into the next sequence by the same amount.
        document: the same token, if attention is confined to documents.
    """

    def __init__(
        self, tokens: Array, block_size: int, seed: int, align: int | None = None, document: int | None = None
    ) -> None:
        self.tokens, self.block_size, self.seed, self.align, self.document = tokens, block_size, seed, align, document
        # One fewer than fits, so that an epoch can start at any offset below block_size.
        self.per_epoch = (len(tokens) - block_size) // block_size
        self._block: tuple[tuple[int, int], NDArray[np.int64]] = ((-1, 0), np.empty(0, np.int64))
        if self.per_epoch < 1:
            raise ConfigError(
                f"model.block_size={block_size} needs at least {2 * block_size} tokens, but the training text "
                f"has {len(tokens)}: use model.block_size={max(1, len(tokens) // 2)} or less, or more text"
            )

    def fill(self, first: int, batch: Batch) -> None:
        starts = self.starts(first, len(batch.tokens))
        if self.align is not None:
            starts = self._aligned(starts, self.align)
        batch.fill(self.tokens, starts)

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the start positions of the sequences before alignment."""
        found = []
        while count:
            epoch, at = divmod(first, self.per_epoch)
            block, skipped = divmod(at, BLOCK)
            found.append(self._starts(epoch, block)[skipped : skipped + count])
            first, count = first + len(found[-1]), count - len(found[-1])
        return np.concatenate(found)

    def _starts(self, epoch: int, block: int) -> NDArray[np.int64]:
        """Return the start positions of the sequences in one block of an epoch."""
        computed, starts = self._block  # read once: another thread may replace it
        if computed != (epoch, block):
            key = f"{self.seed}/{epoch}"
            offset = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % self.block_size
            positions = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.per_epoch))
            starts = offset + self.block_size * Permutation(self.per_epoch, key)(positions)
            self._block = ((epoch, block), starts)
        return starts

    def _aligned(self, starts: NDArray[np.int64], eot: int) -> NDArray[np.int64]:
        """Return ``starts``, each moved to the first ``eot`` in its sequence."""
        moves = (rows(self.tokens, starts, self.block_size) == eot).argmax(axis=1)  # 0 if there is none
        moved: NDArray[np.int64] = starts + moves
        return np.minimum(moved, len(self.tokens) - self.block_size - 1)


class PairOrder(Order):
    """The sequences of prompts and answers; each epoch has all of them, in another order."""

    def __init__(self, rows: PairSequences, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.block_size, self.per_epoch = rows.block_size, len(rows)

    def empty(self, size: int, *, pinned: bool = False) -> Batch:
        return self.rows.empty(size, pinned=pinned)

    def fill(self, first: int, batch: Batch) -> None:
        """Overwrite ``batch`` with the run's sequences starting at index ``first``, except for the scale."""
        self.rows.fill(batch, self._numbers(first, len(batch.tokens)))

    def scale(self, first: int, count: int) -> float:
        """Return T over the mean number of predicted tokens of ``count`` sequences from index ``first``."""
        return self.block_size * count / max(1, int(self.rows.counts(self._numbers(first, count)).sum()))

    def _numbers(self, first: int, count: int) -> NDArray[np.int64]:
        epochs, at = np.divmod(np.arange(first, first + count), self.per_epoch)
        return np.concatenate(
            [Permutation(self.per_epoch, f"{self.seed}/{epoch}")(at[epochs == epoch]) for epoch in np.unique(epochs)]
        )


class Mix(Order):
    """Interleaves several orders, each in proportion to its share.

    Each order contributes a fixed number of every MIX_PERIOD sequences (its share, rounded by largest remainders), at
    positions reshuffled in each period. So an index alone determines how many sequences of each order precede it.
    """

    def __init__(self, orders: Sequence[Order], shares: Sequence[float], seed: int) -> None:
        self.orders, self.seed = orders, seed
        self.block_size, self.document = orders[0].block_size, orders[0].document
        exact = np.array(shares) / sum(shares) * MIX_PERIOD
        self.counts = np.floor(exact).astype(np.int64)
        missing = MIX_PERIOD - int(self.counts.sum())
        self.counts[np.argsort(self.counts - exact, kind="stable")[:missing]] += 1
        self._sorted = np.repeat(np.arange(len(orders)), self.counts)
        self._period: tuple[int, NDArray[np.int64], NDArray[np.int64]] = (-1, self._sorted, self._sorted)
        counts = self.counts.tolist()
        self.per_epoch = max(o.per_epoch * MIX_PERIOD // n for o, n in zip(orders, counts, strict=True))

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the order that sequence ``index`` of the run comes from, and its index in that order."""
        period, at = divmod(index, MIX_PERIOD)
        computed, sources, before = self._period  # read once: another thread may replace it
        if computed != period:
            order = Permutation(MIX_PERIOD, f"{self.seed}/mix/{period}")(np.arange(MIX_PERIOD))
            sources = self._sorted[order]
            before = np.empty(MIX_PERIOD, dtype=np.int64)
            for number, count in enumerate(self.counts.tolist()):
                before[sources == number] = np.arange(count)
            self._period = (period, sources, before)
        number = int(sources[at])
        return number, period * int(self.counts[number]) + int(before[at])

    def fill(self, first: int, batch: Batch) -> None:
        for row in range(len(batch.tokens)):
            number, index = self.locate(first + row)
            self.orders[number].fill(index, Batch(batch.tokens[row : row + 1], batch.targets[row : row + 1]))


def order_of_run(cfg: Config, corpus: Corpus) -> Order:
    """Return the training sequences of a run.

    Raises:
        ConfigError: if the corpus is too short, or an option needs an end-of-text token that the tokenizer lacks.
    """
    tokenizer, seed, size = corpus.tokenizer, cfg.train.seed, cfg.text_model.block_size
    align = tokenizer.eot_for("data.align=true") if cfg.text.align else None
    if cfg.data.kind in ANSWERED:
        return PairOrder(pairs_of_run(cfg, corpus, corpus.train), seed)
    document = tokenizer.eot_for("data.mask_documents=true") if cfg.text.mask_documents else None
    if not corpus.mix:
        return Sequences(corpus.train, size, seed, align, document)
    orders = [Sequences(part.train, size, seed + i, align, document) for i, part in enumerate(corpus.mix)]
    return Mix(orders, [part.fraction for part in corpus.mix], seed)


def pairs_of_run(cfg: Config, corpus: Corpus, tokens: Array) -> PairSequences:
    """Return the sequences of pairs in ``tokens``, a split of the run's corpus.

    Raises:
        ConfigError: the tokenizer has no end-of-text token, which ends an answer, or no answer is left of any pair.
    """
    data, split = cfg.text, "train" if tokens is corpus.train else "val"
    # The last token predicts the end of the last answer; in a conversation, the template ends each.
    pad = corpus.tokenizer.eot or 0 if data.kind == "chat" else corpus.tokenizer.eot_for("data.kind=pairs") | ANSWER
    return PairSequences(tokens, cfg.text_model.block_size, int(pad), data, split=split)
