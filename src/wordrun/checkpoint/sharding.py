"""How a tensor is divided into boxes: a few numbers determine which rank holds which part.

Nothing here needs torch or another rank, and the cost does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def window(self) -> tuple[slice, ...]:
        """The slices of the tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def within(self, shape: Sequence[int]) -> Box:
        """Return the part of this box that lies in a tensor of ``shape``."""
        sizes = (max(0, min(n, most - at)) for at, n, most in zip(self.offset, self.shape, shape, strict=True))
        return Box(self.offset, tuple(sizes))


class Cut(NamedTuple):
    """Divides boxes into equal shards along one dimension; the last shards may be smaller, or empty."""

    dim: int
    shards: int
    stride: int
    """The difference between the ranks that hold neighboring shards."""

    def step(self, box: Box) -> int:
        """Return the length of a shard of ``box`` along ``dim``."""
        return -(-box.shape[self.dim] // self.shards)

    def shard(self, box: Box, number: int) -> Box:
        """Return a shard of ``box``."""
        dim, step = self.dim, self.step(box)
        start = min(number * step, box.shape[dim])
        size = min(step, box.shape[dim] - start)
        return Box(
            (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :]),
            (*box.shape[:dim], size, *box.shape[dim + 1 :]),
        )


@dataclass(frozen=True)
class Sharding:
    """A tensor of ``shape``, divided by one cut after the other."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    def first_shard(self) -> Sharding:
        """Return the sharding of one shard of the first cut by the other cuts; the first cut must give equal shards."""
        cut, *rest = self.cuts
        return Sharding(cut.shard(Box((0,) * len(self.shape), self.shape), 0).shape, tuple(rest))

    def box(self, rank: int) -> Box:
        """Return the part that ``rank`` holds."""
        box = Box((0,) * len(self.shape), self.shape)
        for cut in self.cuts:
            box = cut.shard(box, rank // cut.stride % cut.shards)
        return box

    def overlapping(self, region: Box) -> Iterator[tuple[int, Box]]:
        """Yield the boxes that share elements with ``region``, each with its rank, counted from the first."""
        yield from self._divided(0, Box((0,) * len(self.shape), self.shape), self.cuts, region)

    def _divided(self, rank: int, box: Box, cuts: Sequence[Cut], region: Box) -> Iterator[tuple[int, Box]]:
        if not cuts:
            yield rank, box
            return
        cut = cuts[0]
        step, start = cut.step(box), region.offset[cut.dim] - box.offset[cut.dim]
        stop = min(start + region.shape[cut.dim], box.shape[cut.dim])
        for number in range(max(0, start) // step, -(-stop // step)) if step else ():
            yield from self._divided(rank + number * cut.stride, cut.shard(box, number), cuts[1:], region)
