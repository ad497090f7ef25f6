"""Decides which rank computes which of Muon's matrices, and exchanges the matrices.

Muon needs complete matrices, and the ranks hold shards or copies of them. So each matrix is assigned to one rank, its
owner. Shards go to the owners, and results back, in one all-to-all per bucket and direction; while one bucket is sent,
another is computed. Each rank derives its own sends and receives from the layout of the matrices. Nothing is gathered
for that, and the time for it hardly depends on the number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wordrun.checkpoint.sharding import Box, Cut, Sharding

BUCKET = 2**21
"""A bucket has about this many elements per rank: 8 MiB in fp32."""


class Transfer(NamedTuple):
    """A box of the matrix ``item`` to be sent."""

    source: int
    target: int
    item: int
    box: Box


class Route:
    """This rank's part in an all-to-all of matrices.

    Args:
        transfers: what this rank sends and receives.
        rank: this rank in the group.
        ranks: size of the group.
        is_silent: whether no rank sends anything to another one.
    """

    def __init__(self, transfers: Sequence[Transfer], rank: int, ranks: int, *, is_silent: bool) -> None:
        self.is_silent = is_silent
        sent = [each for each in transfers if each.source != each.target]
        self.kept = [each for each in transfers if each.source == each.target]
        self.leaving = sorted((each for each in sent if each.source == rank), key=lambda each: each.target)
        self.arriving = sorted((each for each in sent if each.target == rank), key=lambda each: each.source)
        self.sent, self.received = [0] * ranks, [0] * ranks
        """Number of elements to send to each rank, and to receive from each."""
        for each in self.leaving:
            self.sent[each.target] += each.box.numel
        for each in self.arriving:
            self.received[each.source] += each.box.numel


@dataclass(frozen=True)
class Assignment:
    """Which rank of a group owns which matrix; exchanges the matrices between their holders and their owners.

    Args:
        shapes: the shape of each matrix.
        routes: for each bucket, the exchange to the owners and the one back.
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
        """Send this rank's shards of ``bucket``'s matrices; return a function that returns the complete ones owned."""
        finish = self._exchange(self.routes[bucket][0], lambda each: mine[each.item])

        def assemble() -> dict[int, Tensor]:
            complete: dict[int, Tensor] = {}
            for (_, _, item, box), shard in finish():
                if self.shapes[item] == box.shape:
                    complete[item] = shard
                else:
                    complete.setdefault(item, shard.new_empty(self.shapes[item]))[box.window] = shard
            return complete

        return assemble

    def from_owners(self, bucket: int, complete: dict[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send out the matrices that this rank owns in ``bucket``; return a function that returns its shards of all."""
        finish = self._exchange(self.routes[bucket][1], lambda each: complete[each.item][each.box.window])
        return lambda: {each.item: shard for each, shard in finish()}

    def _exchange(
        self, route: Route, data: Callable[[Transfer], Tensor]
    ) -> Callable[[], Iterator[tuple[Transfer, Tensor]]]:
        """Begin an all-to-all; return a function that waits for it, and returns what arrives at this rank."""
        kept = [(each, data(each)) for each in route.kept]
        if route.is_silent:
            return lambda: iter(kept)
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = torch.cat([nothing, *(data(each).reshape(-1) for each in route.leaving)])
        received = nothing.new_empty(sum(route.received))
        work = dist.all_to_all_single(received, flat, route.received, route.sent, group=self.group, async_op=True)

        def finish() -> Iterator[tuple[Transfer, Tensor]]:
            work.wait()
            yield from kept
            shards = torch.split(received, [each.box.numel for each in route.arriving])
            for each, shard in zip(route.arriving, shards, strict=True):
                yield each, shard.view(each.box.shape)

        return finish


def assign(
    shardings: Sequence[Sharding], costs: Sequence[float], group: Any, dtype: torch.dtype, device: torch.device
) -> Assignment:
    """Divide matrices among the ranks of ``group``, which hold their shards.

    Args:
        shardings: how each matrix is divided.
        costs: the cost of the work on each matrix.
        group: the ranks; None: this rank alone.
        dtype: of what is exchanged.
        device: where the group communicates.
    """
    numbers = [0] if group is None else dist.get_process_group_ranks(group)
    rank, ranks = (0 if group is None else dist.get_rank(group)), len(numbers)
    holders: dict[tuple[Cut, ...], Holders] = {}
    # Matrices of one shape together, so that an owner computes several at once.
    order = sorted(range(len(shardings)), key=lambda item: (-costs[item], shardings[item].shape, item))
    routes: list[tuple[Route, Route]] = []
    total = [0.0] * ranks
    while order:
        there, back, silent = list[Transfer](), list[Transfer](), [True, True]
        load, size, count = [(0.0, total[each], each) for each in range(ranks)], 0, 0
        heapq.heapify(load)
        while order and (size < BUCKET * ranks or count < ranks):
            item = order.pop(0)
            sharding, (busy, before, owner) = shardings[item], heapq.heappop(load)
            heapq.heappush(load, (busy + costs[item], before + costs[item], owner))
            total[owner] += costs[item]
            held = holders.setdefault(sharding.cuts, Holders(sharding.cuts, numbers))
            transfers = _to(owner, item, sharding, held, rank), _from(owner, item, sharding, held, rank)
            there, back = there + transfers[0][0], back + transfers[1][0]
            silent = [so_far and each[1] for so_far, each in zip(silent, transfers, strict=True)]
            count, size = count + 1, size + Box((), sharding.shape).numel
        to, back_again = (Route(t, rank, ranks, is_silent=q) for t, q in zip((there, back), silent, strict=True))
        routes.append((to, back_again))
    return Assignment([sharding.shape for sharding in shardings], routes, group, dtype, device)


@dataclass(frozen=True)
class Holders:
    """Which ranks of a group hold the same boxes of matrices with these ``cuts``."""

    cuts: tuple[Cut, ...]
    numbers: Sequence[int]
    """The group's ranks, by their numbers in the job."""

    def box_number(self, rank: int) -> int:
        """Return the number of the box that a rank of the group holds, numbered as in ``Sharding.overlapping``."""
        return sum(self.numbers[rank] // cut.stride % cut.shards * cut.stride for cut in self.cuts)

    @cached_property
    def by_box(self) -> dict[int, list[int]]:
        """The ranks of the group that hold each box."""
        found: dict[int, list[int]] = {}
        for rank in range(len(self.numbers)):
            found.setdefault(self.box_number(rank), []).append(rank)
        return found

    def source(self, number: int, owner: int) -> int:
        """Return which of the holders of a box sends it to ``owner``, which may itself be one of them."""
        ranks = self.by_box[number]
        return owner if self.box_number(owner) == number else ranks[owner % len(ranks)]


def _boxes(sharding: Sharding) -> dict[int, Box]:
    """Return the boxes that are not empty, by their numbers."""
    return dict(sharding.overlapping(Box((0,) * len(sharding.shape), sharding.shape)))


def _to(owner: int, item: int, sharding: Sharding, held: Holders, rank: int) -> tuple[list[Transfer], bool]:
    """Return what ``rank`` sends or receives of a matrix on its way to its owner, and whether nobody sends anything."""
    number, box = held.box_number(rank), sharding.box(held.numbers[rank])
    if rank == owner:
        mine = [Transfer(held.source(at, owner), owner, item, each) for at, each in _boxes(sharding).items()]
    else:
        is_mine = box.numel and held.source(number, owner) == rank
        mine = [Transfer(rank, owner, item, box)] if is_mine else []
    return mine, sharding.box(held.numbers[owner]).shape == sharding.shape


def _from(owner: int, item: int, sharding: Sharding, held: Holders, rank: int) -> tuple[list[Transfer], bool]:
    """Return what ``rank`` sends or receives of a matrix on its way back, and whether nobody sends anything."""
    box = sharding.box(held.numbers[rank])
    if rank == owner:
        boxes = _boxes(sharding).items()
        mine = [Transfer(owner, each, item, part) for at, part in boxes for each in held.by_box[at]]
    else:
        mine = [Transfer(owner, rank, item, box)] if box.numel else []
    is_complete = sharding.box(held.numbers[owner]).shape == sharding.shape
    return mine, is_complete and held.by_box[held.box_number(owner)] == [owner]
