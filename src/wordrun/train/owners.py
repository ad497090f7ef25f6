"""Gives each rank whole matrices to work on, of matrices that are sharded over the ranks or copied to all of them.

Each matrix has an owner. The shards go to the owners, and the results back, in one all-to-all per bucket and direction;
while one bucket is under way, another is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wordrun.checkpoint.shards import shard_of
from wordrun.dist.collectives import gather_json

BUCKET = 2**21
"""Elements from which a rank's matrices are enough for a bucket: 8 MiB in fp32."""


class Box(NamedTuple):
    """The part of a matrix that a rank holds."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def window(self) -> tuple[slice, ...]:
        """The slices of the matrix."""
        return tuple(slice(at, at + n) for at, n in zip(self.offset, self.shape, strict=True))


class Transfer(NamedTuple):
    """A box of the matrix ``item`` on its way."""

    source: int
    target: int
    item: int
    box: Box


@dataclass(frozen=True)
class Owners:
    """Who owns which matrix.

    Args:
        shapes: the shape of each matrix.
        boxes: the box of each rank, for each matrix.
        owner: the owner of each matrix.
        buckets: the matrices that are exchanged together.
        group: the ranks; None: this rank alone.
        dtype: of what is exchanged.
        device: where the group communicates.
    """

    shapes: Sequence[tuple[int, ...]]
    boxes: Sequence[Sequence[Box]]
    owner: Sequence[int]
    buckets: Sequence[Sequence[int]]
    group: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def to_owners(self, bucket: Sequence[int], mine: Sequence[Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send this rank's shards of the matrices in ``bucket``; the result returns the whole ones that it owns.

        Of several ranks with the same shard one sends it, if possible the owner to itself.
        """
        transfers = []
        for item in bucket:
            owner, holders = self.owner[item], dict[Box, list[int]]()
            for rank, box in enumerate(self.boxes[item]):
                holders.setdefault(box, []).append(rank)
            for box, ranks in holders.items():
                transfers.append(Transfer(owner if owner in ranks else ranks[owner % len(ranks)], owner, item, box))
        finish = self._exchange(transfers, lambda each: mine[each.item])

        def assemble() -> dict[int, Tensor]:
            wholes: dict[int, Tensor] = {}
            for (_, _, item, box), piece in finish():
                if self.shapes[item] == box.shape:
                    wholes[item] = piece
                else:
                    wholes.setdefault(item, piece.new_empty(self.shapes[item]))[box.window] = piece
            return wholes

        return assemble

    def from_owners(self, bucket: Sequence[int], wholes: dict[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send the parts of the matrices that this rank owns in ``bucket``; the result returns this rank's shards."""
        transfers = [
            Transfer(self.owner[item], rank, item, box) for item in bucket for rank, box in enumerate(self.boxes[item])
        ]
        finish = self._exchange(transfers, lambda each: wholes[each.item][each.box.window])
        return lambda: {each.item: piece for each, piece in finish()}

    def _exchange(
        self, transfers: Sequence[Transfer], data: Callable[[Transfer], Tensor]
    ) -> Callable[[], Iterator[tuple[Transfer, Tensor]]]:
        """Begin the ``transfers``, which all ranks know; the result waits, and returns what arrives at this rank."""
        rank = self.rank
        kept = [(each, data(each)) for each in transfers if each.source == each.target == rank]
        sent = [each for each in transfers if each.source != each.target and 0 not in each.box.shape]
        if not sent:
            return lambda: iter(kept)
        ranks = range(dist.get_world_size(self.group))
        out = [[each for each in sent if each.source == rank and each.target == to] for to in ranks]
        arriving = [[each for each in sent if each.target == rank and each.source == at] for at in ranks]
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = torch.cat([nothing, *(data(each).reshape(-1) for some in out for each in some)])
        into, out_of = ([sum(math.prod(each.box.shape) for each in some) for some in way] for way in (arriving, out))
        received = nothing.new_empty(sum(into))
        work = dist.all_to_all_single(received, flat, into, out_of, group=self.group, async_op=True)

        def finish() -> Iterator[tuple[Transfer, Tensor]]:
            work.wait()
            yield from kept
            here = [each for some in arriving for each in some]
            for each, piece in zip(here, torch.split(received, [math.prod(t.box.shape) for t in here]), strict=True):
                yield each, piece.view(each.box.shape)

        return finish


def assign(
    tensors: Sequence[Tensor], costs: Sequence[float], group: Any, dtype: torch.dtype, device: torch.device
) -> Owners:
    """Divide the matrices ``tensors``, of which this rank holds shards, among the ranks of ``group``.

    Every rank of the group must call this. ``costs`` are what each matrix takes to work on.
    """
    mine = [shard_of("", tensor) for tensor in tensors]
    boxes = [[(list(each.offset), list(each.data.shape)) for each in mine]]
    if group is not None:
        boxes = gather_json(boxes[0], device, group)
    by_item = [[Box(*map(tuple, each)) for each in some] for some in zip(*boxes, strict=True)]
    owner, buckets, total = [0] * len(tensors), list[list[int]](), [0.0] * len(boxes)
    # Matrices of one shape together, so that an owner computes several at once.
    order = sorted(range(len(tensors)), key=lambda item: (-costs[item], tuple(tensors[item].shape), item))
    full = BUCKET * len(boxes)
    size, load = full, list(total)
    for item in order:
        if size >= full and (not buckets or len(buckets[-1]) >= len(boxes)):
            buckets.append([])
            size, load = 0, [0.0] * len(boxes)
        best = min(range(len(boxes)), key=lambda rank: (load[rank], total[rank]))
        buckets[-1].append(item)
        owner[item], size = best, size + tensors[item].numel()
        load[best] += costs[item]
        total[best] += costs[item]
    return Owners([tuple(each.shape) for each in tensors], by_item, owner, buckets, group, dtype, device)
