"""The parts of ``test_dist --bench`` that need no other rank."""

from __future__ import annotations

from itertools import combinations

import pytest

from wordrun.common.errors import ConfigError
from wordrun.dist import World, bandwidth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1KB..64KB", [1024, 4096, 16384, 65536]),
        ("1K..3KB", [1024, 3072]),
        ("4 .. 16", [4, 16]),
        ("2MB", [2 * 2**20]),
        ("1gb..1GB", [2**30]),
    ],
)
def test_a_range_of_sizes(text: str, expected: list[int]) -> None:
    assert bandwidth.sizes(text) == expected


@pytest.mark.parametrize("text", ["", "big", "1KB..", "4KB..1KB", "1..2..3", "2", "-1KB", "1TB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sizes"):
        bandwidth.sizes(text)


def test_a_layout_has_all_ranks() -> None:
    assert bandwidth.layout("", 8) is None
    found = bandwidth.layout("shard=4,tp=2", 8)
    assert found is not None
    assert found.shape == (1, 1, 4, 1, 2)
    for text, message in (
        ("tp=3", "3 ranks, but there are 8"),
        ("x=8", "x should be AXIS=RANKS; the axes are pp"),
        ("tp=0", "tp should be"),
        ("tp", "tp should be"),
    ):
        with pytest.raises(ConfigError, match=message):
            bandwidth.layout(text, 8)


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_every_pair_of_nodes_meets_once(nodes: int) -> None:
    met = []
    for partners in bandwidth.rounds(nodes):
        assert all(partners[other] == node for node, other in partners.items())
        met += [pair for pair in partners.items() if pair[0] < pair[1]]
    assert sorted(met) == list(combinations(range(nodes), 2))


NODES = [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, {"all ranks": (0, 1, 2, 3, 4), "within a node": (0, 1), "across nodes": (0, 2)}),
        (3, {"all ranks": (0, 1, 2, 3, 4), "within a node": (2, 3, 4), "across nodes": (1, 3)}),
    ],
)
def test_groups_within_and_across_nodes(
    rank: int, expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    created = []

    def new_group(ranks: list[int]) -> str:
        created.append(ranks)
        return f"group of {ranks}"

    monkeypatch.setattr(bandwidth.td, "new_group", new_group)
    world = World(rank=rank, size=5, nodes=2)
    found = list(bandwidth.groups(world, NODES, None))
    assert {group.name: group.ranks for group in found} == expected
    assert [group.handle for group in found] == [None, *(f"group of {list(group.ranks)}" for group in found[1:])]
    assert created == [[0, 1], [2, 3, 4], [0, 2], [1, 3]]  # the same on every rank


def test_a_rank_without_a_peer_on_another_node_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth.td, "new_group", list)
    last = list(bandwidth.groups(World(rank=4, size=5, nodes=2), NODES, None))[-1]
    assert (last.name, last.handle) == ("across nodes", bandwidth.td.GroupMember.NON_GROUP_MEMBER)
