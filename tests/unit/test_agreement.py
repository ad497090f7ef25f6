"""Ranks meet through the store: threads, each with a client of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from wordrun.common.errors import WorldError
from wordrun.dist import coordination, rendezvous
from wordrun.dist.coordination import Agreement
from wordrun.dist.world import World

N = 6


def together(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Agreement], Any], timeout_s: int = 60) -> list[Any]:
    """Return what ``act`` returns for each rank, and the number of keys that are left in the store."""
    monkeypatch.setattr(coordination, "shared_store", lambda world, timeout_s: stores[world.rank])
    wait = timedelta(seconds=60)
    first = TCPStore("127.0.0.1", 0, N, True, timeout=wait, wait_for_workers=False)
    stores = [first, *(TCPStore("127.0.0.1", first.port, N, False, timeout=wait) for _ in range(N - 1))]
    before = first.num_keys()
    monkeypatch.setattr(coordination, "_agreements", itertools.repeat(0))  # each thread is a process
    made = [Agreement(World(rank=rank, size=N), timeout_s) for rank in range(N)]
    with ThreadPoolExecutor(N) as pool:
        found = list(pool.map(act, range(N), made))
    return [*found, first.num_keys() - before]


def test_all_learn_the_first_problem_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(rank: int, made: Agreement) -> list[Any]:
        return [made.meet(), made.meet("rank 2: full" if rank == 2 else ""), made.meet(value=[rank]), made.meet()]

    *found, left = together(monkeypatch, act)
    assert all([problem for problem, _ in each] == ["", "rank 2: full", "", ""] for each in found)
    assert sorted(found[0][2][1]) == [[rank] for rank in range(N)]
    assert all(values == [] for each in found[1:] for _, values in each)
    assert left == 0


def test_one_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(rank: int, made: Agreement) -> str:
        if rank == N - 1:
            return ""
        with pytest.raises(WorldError, match=f"not all of {N} ranks reached the same point within 1 s") as error:
            made.meet()
        return str(error.value)

    assert all(together(monkeypatch, act, timeout_s=1)[: N - 1])


def test_a_rank_alone_agrees_with_itself() -> None:
    alone = Agreement(World(), 1)
    assert alone.meet("full", 3) == ("full", [3])
    assert alone.meet() == ("", [])


def test_rank_0_has_room_for_a_connection_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 5000)]
    monkeypatch.setattr(rendezvous.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(rendezvous.resource, "setrlimit", lambda _, both: limits.append(both))
    rendezvous._allow_connections(World(size=100))
    assert limits == [(1024, 5000)]
    rendezvous._allow_connections(World(size=2000))
    assert limits.pop() == (2512, 5000)
    rendezvous._allow_connections(World(size=4900))
    assert limits.pop() == (5000, 5000), "fewer than usual, but enough"
    with pytest.raises(WorldError, match=r"may open 5000 files, but 100000 ranks connect to it: raise the hard limit"):
        rendezvous._allow_connections(World(size=100_000, hosts=("a",)))
