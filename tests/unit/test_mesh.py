"""The arithmetic of the mesh: who does what with whom, on 8 ranks and on all of Aurora."""

from __future__ import annotations

import time
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from wordrun.common.errors import ConfigError
from wordrun.dist.mesh import AXES, Layout, resolve

sizes = st.integers(1, 5)
layouts = st.builds(Layout, sizes, sizes, sizes, sizes)


@given(layouts)
def test_ranks_lie_as_in_an_array_of_that_shape(layout: Layout) -> None:
    array = np.arange(layout.size).reshape(layout.shape)
    for number, axis in enumerate(AXES):
        lines = np.moveaxis(array, number, -1).reshape(-1, layout.shape[number])
        for line in lines.tolist():
            for place, rank in enumerate(line):
                assert list(layout.group(rank, axis)) == line
                assert layout.index(rank, axis) == place


@given(layouts)
def test_the_data_is_shared_among_replicas_and_shards_alone(layout: Layout) -> None:
    readers: dict[int, list[int]] = {}
    for rank in range(layout.size):
        readers.setdefault(layout.dp_index(rank), []).append(rank)
    assert sorted(readers) == list(range(layout.dp))
    assert {len(ranks) for ranks in readers.values()} == {layout.pp * layout.cp * layout.tp}
    for rank in range(layout.size):
        for axis in ("pp", "cp", "tp"):
            assert {layout.dp_index(peer) for peer in layout.group(rank, axis)} == {layout.dp_index(rank)}


@given(layouts, st.sampled_from(AXES))
def test_one_axis_takes_the_rest(layout: Layout, axis: str) -> None:
    wanted = dict(zip(AXES, layout.shape, strict=True)) | {axis: -1}
    assert resolve(layout.size, layout.size, wanted) == layout


def test_aurora() -> None:
    """10,624 nodes of 12 tiles: 127,488 ranks, each of which looks at its own groups alone."""
    begin = time.process_time()
    layout = resolve(127_488, 12, {"pp": 8, "replicate": -1, "shard": 16, "tp": 12})
    assert layout == Layout(pp=8, replicate=83, shard=16, tp=12)
    for rank in range(0, layout.size, 997):
        groups = {axis: layout.group(rank, axis) for axis in AXES}
        assert {axis: len(group) for axis, group in groups.items()} == dict(zip(AXES, layout.shape, strict=True))
        assert all(rank in group for group in groups.values())
        assert {peer // 12 for peer in groups["tp"]} == {rank // 12}, "a tensor-parallel group is one node"
    assert time.process_time() - begin < 1.0


def test_a_thousand_ranks() -> None:
    layout = resolve(1024, 8, {"pp": 4, "shard": -1, "tp": 8})
    assert layout == Layout(pp=4, replicate=1, shard=32, tp=8)
    assert list(layout.group(777, "tp")) == list(range(776, 784))
    assert list(layout.group(777, "pp")) == [9, 265, 521, 777]
    assert [layout.dp_index(rank) for rank in (0, 7, 8, 255, 256, 777)] == [0, 0, 1, 31, 0, 1]


@pytest.mark.parametrize(
    ("ranks", "per_node", "wanted", "shape"),
    [
        (8, 4, {"shard": -1, "tp": None}, (1, 1, 2, 1, 4)),  # tp: the ranks of a node
        (8, 8, {"pp": None, "replicate": -1}, (8, 1, 1, 1, 1)),  # pp: all that the others leave
        (8, 8, {"pp": None, "replicate": -1, "tp": 2}, (4, 1, 1, 1, 2)),
        (8, 8, {"pp": 2, "replicate": -1}, (2, 4, 1, 1, 1)),
        (1, 1, {"shard": -1}, (1, 1, 1, 1, 1)),
    ],
)
def test_what_is_left_open(ranks: int, per_node: int, wanted: dict[str, Any], shape: tuple[int, ...]) -> None:
    layout = resolve(ranks, per_node, wanted)
    assert layout.shape == shape
    assert layout.size == prod(shape) == ranks


@pytest.mark.parametrize(
    ("ranks", "per_node", "wanted", "says"),
    [
        (6, 6, {"tp": 4, "shard": -1}, ["backend.tp=4 does not fit 6 ranks", "start 4 ranks", "use backend.tp=2 or 3"]),
        (8, 8, {"pp": 2, "tp": 3, "shard": -1}, ["backend.pp=2 x backend.tp=3 = 6", "8 ranks", "start 6 ranks"]),
        (8, 8, {"shard": 4}, ["backend.shard=4 does not fit 8 ranks", "start 4 ranks"]),
        (2, 2, {"pp": 2, "tp": 2, "shard": -1}, ["backend.pp=2 x backend.tp=2 = 4 does not fit 2 ranks: start 4"]),
        (1, 1, {"pp": 2}, ["does not fit 1 rank: start 2 ranks"]),
        (8, 8, {"replicate": -1, "shard": -1}, ["backend.replicate=-1 and backend.shard=-1: only one axis"]),
        (8, 8, {"tp": 0, "shard": -2}, ["backend.tp=0 should be at least 1", "backend.shard=-2 should be"]),
        (8, 4, {"tp": 8}, ["backend.tp=8 would span nodes, which have 4 ranks each", "use backend.tp=4"]),
        (12, 6, {"tp": 4, "shard": -1}, ["backend.tp=4 would span nodes", "use backend.tp=3"]),
    ],
)
def test_numbers_that_do_not_fit(ranks: int, per_node: int, wanted: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(ranks, per_node, wanted)
    for words in says:
        assert words in str(caught.value)
