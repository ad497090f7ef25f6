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

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Transfer(NamedTuple):
    """A box of the matrix ``item`` on its way."""

    source: int
    target: int
    item: int
    box: Box


class Route:
    """This rank's part in an all-to-all of ``transfers``, which all ``ranks`` know."""

    def __init__(self, transfers: Sequence[Transfer], rank: int, ranks: int) -> None:
        sent = [each for each in transfers if each.source != each.target and 0 not in each.box.shape]
        self.is_silent = not sent
        self.kept = [each for each in transfers if each.source == each.target == rank]
        self.leaving = sorted((each for each in sent if each.source == rank), key=lambda each: each.target)
        self.arriving = sorted((each for each in sent if each.target == rank), key=lambda each: each.source)
        self.sent, self.received = [0] * ranks, [0] * ranks
        """Elements for each rank, and from each."""
        for each in self.leaving:
            self.sent[each.target] += each.box.numel
        for each in self.arriving:
            self.received[each.source] += each.box.numel


@dataclass(frozen=True)
class Owners:
    """Exchanges matrices with their owners.

    Args:
        shapes: the shape of each matrix.
        routes: for each bucket, the way to the owners and the way back.
        group: the ranks; None: this rank alone.
        dtype: of what is exchanged.
        device: where the group communicates.
    """

    shapes: Sequence[tuple[int, ...]]
    routes: Sequence[tuple[Route, Route]]
    group: Any
    dtype: torch.dtype
    device: torch.device

    def to_owners(self, bucket: int, mine: Sequence[Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send this rank's shards of the matrices in ``bucket``; the result returns the whole ones that it owns."""
        finish = self._exchange(self.routes[bucket][0], lambda each: mine[each.item])

        def assemble() -> dict[int, Tensor]:
            wholes: dict[int, Tensor] = {}
            for (_, _, item, box), piece in finish():
                if self.shapes[item] == box.shape:
                    wholes[item] = piece
                else:
                    wholes.setdefault(item, piece.new_empty(self.shapes[item]))[box.window] = piece
            return wholes

        return assemble

    def from_owners(self, bucket: int, wholes: dict[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send the parts of the matrices that this rank owns in ``bucket``; the result returns this rank's shards."""
        finish = self._exchange(self.routes[bucket][1], lambda each: wholes[each.item][each.box.window])
        return lambda: {each.item: piece for each, piece in finish()}

    def _exchange(
        self, route: Route, data: Callable[[Transfer], Tensor]
    ) -> Callable[[], Iterator[tuple[Transfer, Tensor]]]:
        """Begin an all-to-all; the result waits for it, and returns what arrives at this rank."""
        kept = [(each, data(each)) for each in route.kept]
        if route.is_silent:
            return lambda: iter(kept)
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = torch.cat([nothing, *(data(each).reshape(-1) for each in route.leaving)])
        received = nothing.new_empty(sum(route.received))
        work = dist.all_to_all_single(
            received, flat, route.received, route.sent, group=self.group, async_op=True
        )  # fmt: skip

        def finish() -> Iterator[tuple[Transfer, Tensor]]:
            work.wait()
            yield from kept
            pieces = torch.split(received, [each.box.numel for each in route.arriving])
            for each, piece in zip(route.arriving, pieces, strict=True):
                yield each, piece.view(each.box.shape)

        return finish


def assign(
    tensors: Sequence[Tensor], costs: Sequence[float], group: Any, dtype: torch.dtype, device: torch.device
) -> Owners:
    """Divide the matrices ``tensors``, of which this rank holds shards, among the ranks of ``group``.

    Every rank of the group must call this. ``costs`` are what each matrix takes to work on.
    """
    mine = [shard_of("", tensor) for tensor in tensors]
    described = [(list(each.offset), list(each.data.shape)) for each in mine]
    by_rank = [described] if group is None else gather_json(described, device, group)
    rank, ranks = (0 if group is None else dist.get_rank(group)), len(by_rank)
    boxes = [[Box(*map(tuple, each)) for each in some] for some in zip(*by_rank, strict=True)]
    # Matrices of one shape together, so that an owner computes several at once.
    order = sorted(range(len(tensors)), key=lambda item: (-costs[item], tuple(tensors[item].shape), item))
    buckets: list[tuple[list[Transfer], list[Transfer]]] = []
    total, load, count, size = [0.0] * ranks, [0.0] * ranks, ranks, BUCKET * ranks
    for item in order:
        if size >= BUCKET * ranks and count >= ranks:
            buckets.append(([], []))
            load, count, size = [0.0] * ranks, 0, 0
        owner = min(range(ranks), key=lambda each: (load[each], total[each]))
        there, back = buckets[-1]
        there += _to(owner, item, boxes[item])
        back += [Transfer(owner, each, item, box) for each, box in enumerate(boxes[item])]
        load[owner], total[owner] = load[owner] + costs[item], total[owner] + costs[item]
        count, size = count + 1, size + tensors[item].numel()
    routes = [(Route(there, rank, ranks), Route(back, rank, ranks)) for there, back in buckets]
    return Owners([tuple(each.shape) for each in tensors], routes, group, dtype, device)


def _to(owner: int, item: int, boxes: Sequence[Box]) -> list[Transfer]:
    """Return the transfers of a matrix to its ``owner``: of several ranks with the same box one sends it."""
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        holders.setdefault(box, []).append(rank)
    return [
        Transfer(owner if owner in ranks else ranks[owner % len(ranks)], owner, item, box)
        for box, ranks in holders.items()
    ]
