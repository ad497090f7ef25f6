"""Several data sets by weight, in an order that is a function of the seed and an index alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wordrun.config import MIX_PERIOD
from wordrun.data.loader import Batch, Order, Permutation


class Mix:
    """The sequences of several orders in turn, each as often as its share.

    Of every MIX_PERIOD sequences each order has a fixed number (its share, rounded by largest remainders), at places
    that are shuffled anew in each period. So it is known at once how many sequences of each lie before any index.
    """

    def __init__(self, orders: Sequence[Order], shares: Sequence[float], seed: int) -> None:
        self.orders, self.seed = orders, seed
        self.block_size = orders[0].block_size
        exact = np.array(shares) / sum(shares) * MIX_PERIOD
        self.counts = np.floor(exact).astype(np.int64)
        missing = MIX_PERIOD - int(self.counts.sum())
        self.counts[np.argsort(self.counts - exact, kind="stable")[:missing]] += 1
        self._sorted = np.repeat(np.arange(len(orders)), self.counts)
        self._period: tuple[int, NDArray[np.int64], NDArray[np.int64]] = (-1, self._sorted, self._sorted)
        counts = self.counts.tolist()
        self.per_epoch: int = max(o.per_epoch * MIX_PERIOD // n for o, n in zip(orders, counts, strict=True))

    def places(self, index: int) -> tuple[int, int]:
        """Return which order sequence ``index`` of the run comes from, and its index there."""
        period, at = divmod(index, MIX_PERIOD)
        of, sources, before = self._period  # at once: another thread may be at work, too
        if of != period:
            order = Permutation(MIX_PERIOD, f"{self.seed}/mix/{period}")(np.arange(MIX_PERIOD))
            sources = self._sorted[order]
            before = np.empty(MIX_PERIOD, dtype=np.int64)
            for number, count in enumerate(self.counts.tolist()):
                before[sources == number] = np.arange(count)
            self._period = (period, sources, before)
        number = int(sources[at])
        return number, period * int(self.counts[number]) + int(before[at])

    def batch(self, first: int, count: int) -> Batch:
        """Return the ``count`` sequences from index ``first`` of the run on."""
        batch = Batch.empty(count, self.block_size)
        self.fill(first, batch)
        return batch

    def fill(self, first: int, batch: Batch) -> None:
        """Put the sequences from index ``first`` of the run on into ``batch``."""
        for row in range(len(batch.tokens)):
            number, index = self.places(first + row)
            self.orders[number].fill(index, Batch(batch.tokens[row : row + 1], batch.targets[row : row + 1]))

    def epoch_of(self, index: int) -> float:
        """Return how many times the order that is gone through most slowly has been by sequence ``index``."""
        return index / self.per_epoch
