"""The parts of ``test_dist --bench`` that need no other rank."""

from __future__ import annotations

from itertools import combinations

import pytest

from wordrun import bandwidth
from wordrun.errors import ConfigError


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
    assert found.shape == (1, 1, 4, 2)
    for text, message in (("tp=3", "3 ranks; there are 8"), ("x=8", "x should be AXIS=RANKS; the axes are pp"),
                          ("tp=0", "tp should be"), ("tp", "tp should be")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            bandwidth.layout(text, 8)


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_every_pair_of_nodes_meets_once(nodes: int) -> None:
    met = []
    for partners in bandwidth.rounds(nodes):
        assert all(partners[other] == node for node, other in partners.items())
        met += [pair for pair in partners.items() if pair[0] < pair[1]]
    assert sorted(met) == list(combinations(range(nodes), 2))
