"""SIGKILL to ranks and launch at random moments: the run continues as if nothing had happened (see tests/soak.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import soak

pytestmark = pytest.mark.timeout(300)
# Trains without a launcher and without faults, with as many threads as the ranks of a launch.
ALONE = """
import sys
import torch
import wordrun
from wordrun import dist

with dist.session() as world:
    torch.set_num_threads(1)
    cfg = dist.broadcast(wordrun.compose(sys.argv[1:]) if world.rank == 0 else None, world)
    with wordrun.Trainer(cfg, world) as trainer:
        trainer.train()
"""


@pytest.fixture
def alone(ranks: Any, tmp_path: Path) -> Callable[..., None]:
    """Train with these options on ranks that are forked."""

    def train(words: list[str], n: int = 2) -> None:
        (tmp_path / "alone.py").write_text(ALONE)
        done = ranks(n, tmp_path / "alone.py", *words, "train.memory_checkpoint_interval=0", under="fork")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    return train


def test_four_kills_leave_no_trace(alone: Callable[..., None], tmp_path: Path) -> None:
    """Of a node with its memory, a rank in a save, all ranks at the start, and launch."""
    told = soak.soak(tmp_path, runs=4, seed=6, steps=50, memory=True, whole=alone)
    assert not [each for each in told if "(0)" in each or each.endswith("status 0")], "every kill hit somebody"
    assert "killed a node (1) while training" in told[0]
    assert "killed a rank (1) while saving" in told[1]
    # The second kill takes no memory with it: at most two intervals of 2 steps are lost, and on the disk every 20th is.
    step = json.loads((tmp_path / "run" / "run.json").read_text())["earlier"][2]["resumed_from"]["step"]
    assert step >= int(told[1].partition("after step ")[2].partition(" ")[0].partition(":")[0]) - 4


def test_under_guardians_no_fault_leaves_a_trace(alone: Callable[..., None], tmp_path: Path) -> None:
    """Of ranks, guardians and memory; also of launch and nodes by python tests/soak.py --elastic."""
    told = soak.soak_elastic(tmp_path, faults=4, seed=7, steps=50, ranks=2, whole=alone)
    assert told[0].startswith("hit a rank")
