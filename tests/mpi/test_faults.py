"""SIGKILL to ranks and launch at random moments: the run continues as if nothing had happened (see tests/soak.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import soak


@pytest.mark.timeout(300)
def test_three_kills_leave_no_trace(tmp_path: Path) -> None:
    """A rank while training, all ranks while saving, and launch while starting."""
    told = soak.soak(tmp_path, runs=3, seed=5, steps=50)
    assert len(told) == 3
    assert not [each for each in told if "(0)" in each or each.endswith("status 0")], "every kill hit somebody"


@pytest.mark.timeout(300)
def test_with_checkpoints_in_memory_even_a_lost_node_leaves_no_trace(tmp_path: Path) -> None:
    told = soak.soak(tmp_path, runs=2, seed=6, steps=50, memory=True)
    assert "killed a node (1) while training" in told[0]
    assert "killed a rank (1) while saving" in told[1]
    # The second kill takes no memory with it: at most two intervals of 2 steps are lost, and on the disk every 20th is.
    step = json.loads((tmp_path / "run" / "run.json").read_text())["resumed_from"]["step"]
    assert step >= int(told[1].partition("after step ")[2].partition(" ")[0].partition(":")[0]) - 4


@pytest.mark.timeout(300)
def test_under_guardians_no_fault_leaves_a_trace(tmp_path: Path) -> None:
    """Of ranks, guardians and memory; also of launch and nodes by python tests/soak.py --elastic."""
    told = soak.soak_elastic(tmp_path, faults=5, seed=7, steps=80, ranks=2)
    assert told[0].startswith("hit a rank")


@pytest.mark.timeout(300)
def test_with_fewer_ranks_until_the_node_is_back_the_losses_are_the_same(tmp_path: Path) -> None:
    soak.ELASTIC_VICTIMS, victims = ("a guardian", soak.NODE), soak.ELASTIC_VICTIMS
    try:
        told = soak.soak_elastic(tmp_path, faults=2, seed=8, steps=150, ranks=2, fewer=True)
    finally:
        soak.ELASTIC_VICTIMS = victims
    assert [each.partition(" (")[0] for each in told] == ["hit a guardian", "hit a node"]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["sizes"] == [1, 2]
    assert 1 in [part["world"]["size"] for part in record["earlier"]]
