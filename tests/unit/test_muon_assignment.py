"""Which rank computes which matrix, and what it sends: ranks in one process, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from wordrun.checkpoint.sharding import Cut, Sharding
from wordrun.checkpoint.shards import TensorShard
from wordrun.train.optim import muon_assignment
from wordrun.train.optim.muon_assignment import Assignment, assign

CPU = torch.device("cpu")
Shards = list[list[TensorShard]]


class Exchange:
    """An all-to-all among ranks that call it one after the other, and wait afterwards."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.calls = 0, ranks, 0
        self.waiting: list[tuple[Tensor, list[Tensor]]] = []

    def __call__(
        self, received: Tensor, sent: Tensor, into: list[int], out_of: list[int], group: Any, async_op: bool
    ) -> Exchange:
        assert [len(received), len(sent)] == [sum(into), sum(out_of)]
        self.calls += 1
        self.waiting.append((received, list(sent.split(out_of))))
        if len(self.waiting) == self.ranks:  # all have called
            for rank, (room, _) in enumerate(self.waiting):
                room.copy_(torch.cat([pieces[rank] for _, pieces in self.waiting]))
            self.waiting = []
        return self

    def wait(self) -> None:
        """Everything has arrived."""


def divide(
    shards: Shards, wholes: list[Tensor], exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> list[Assignment]:
    """Return the owners as each rank sees them; ``shards`` are each rank's."""
    monkeypatch.setattr(muon_assignment.dist, "get_process_group_ranks", lambda _: list(range(len(shards))))
    monkeypatch.setattr(muon_assignment.dist, "get_rank", lambda _: exchange.rank)
    monkeypatch.setattr(muon_assignment.dist, "all_to_all_single", exchange)
    found = []
    shardings = [
        Sharding(tuple(whole.shape), (Cut(0, len(shards), 1),) if each.data.shape != whole.shape else ())
        for whole, each in zip(wholes, shards[0], strict=True)
    ]
    for rank, mine in enumerate(shards):
        exchange.rank = rank
        assert all(
            g.box(rank) == (e.offset, e.data.shape) for g, e in zip(shardings, mine, strict=True) if e.data.numel()
        )
        found.append(assign(shardings, [float(whole.numel()) for whole in wholes], object(), torch.float32, CPU))
    return found


def rows(whole: Tensor, ranks: int) -> list[TensorShard]:
    """Return the shards of ``whole`` as FSDP cuts them: the last ranks may have no rows."""
    size = -(-len(whole) // ranks)
    pieces = [whole[rank * size : (rank + 1) * size] for rank in range(ranks)]
    return [TensorShard("", whole.shape, (min(rank * size, len(whole)), 0), p) for rank, p in enumerate(pieces)]


@pytest.mark.parametrize(("width", "buckets"), [(1, 1), (2**17, 2)])
def test_whole_matrices_arrive_and_their_shards_return(
    width: int, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shapes = ((8, 6), (5, 4), (2, 3), (8, 6), (4, 9))  # of 2 rows, two ranks have none
    wholes = [torch.randn(rows, width * columns) for rows, columns in shapes]
    shards: Shards = [list(each) for each in zip(*(rows(whole, 4) for whole in wholes), strict=True)]
    copied = torch.randn(3, 3)  # and one that all ranks have
    for mine in shards:
        mine.append(TensorShard("", copied.shape, (0, 0), copied))
    wholes.append(copied)
    exchange = Exchange(4)
    by_rank = divide(shards, wholes, exchange, monkeypatch)
    assert len(by_rank[0].routes) == buckets, "a bucket has a matrix for each rank"
    done: set[int] = set()
    for number in range(buckets):
        gathering = [each.to_owners(number, [s.data for s in mine]) for each, mine in zip(by_rank, shards, strict=True)]
        owned = [finish() for finish in gathering]
        for each in owned:
            assert not done & each.keys(), "a matrix has one owner"
            done |= each.keys()
            assert all(torch.equal(matrix, wholes[item]) for item, matrix in each.items())
        doubled = [{item: 2 * matrix for item, matrix in each.items()} for each in owned]
        returning = [each.from_owners(number, mine) for each, mine in zip(by_rank, doubled, strict=True)]
        for finish, mine in zip(returning, shards, strict=True):
            for item, piece in finish().items():
                assert torch.equal(piece, 2 * mine[item].data)
    assert done == set(range(len(wholes)))


def test_copies_are_divided_and_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    wholes = [torch.randn(4, 4) for _ in range(6)]
    shards: Shards = [[TensorShard("", each.shape, (0, 0), each) for each in wholes] for _ in range(3)]
    exchange = Exchange(3)
    by_rank = divide(shards, wholes, exchange, monkeypatch)
    owned = [each.to_owners(0, wholes)() for each in by_rank]
    assert exchange.calls == 0, "each owner has its matrices"
    assert [len(each) for each in owned] == [2, 2, 2]
    returned = [each.from_owners(0, mine) for each, mine in zip(by_rank, owned, strict=True)]
    assert [sorted(finish()) for finish in returned] == [list(range(6))] * 3
    assert exchange.calls == 3


def test_a_rank_alone_sends_nothing() -> None:
    wholes = [torch.randn(2, 3), torch.randn(3, 3)]
    alone = assign([Sharding((2, 3)), Sharding((3, 3))], [1.0, 2.0], None, torch.float32, CPU)
    owned = alone.to_owners(0, wholes)()
    assert {item: each is wholes[item] for item, each in owned.items()} == {0: True, 1: True}
    assert sorted(alone.from_owners(0, owned)()) == [0, 1]
