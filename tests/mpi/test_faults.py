"""SIGKILL to ranks and launch at random moments: the run continues as if nothing had happened (see tests/soak.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import soak


@pytest.mark.timeout(300)
def test_five_kills_leave_no_trace(tmp_path: Path) -> None:
    told = soak.soak(tmp_path, runs=5, seed=5, steps=60)
    assert len(told) == 5
    assert not [each for each in told if "(0)" in each or each.endswith("status 0")], "every kill hit somebody"


@pytest.mark.timeout(300)
def test_with_checkpoints_in_memory_even_a_lost_node_leaves_no_trace(tmp_path: Path) -> None:
    told = soak.soak(tmp_path, runs=4, seed=6, steps=80, memory=True)
    assert "killed a node (1)" in told[-1]
    assert "memory" in soak.sources(tmp_path / "run")
