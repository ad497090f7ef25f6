"""SIGKILL to ranks and launch at random moments: the run continues as if nothing had happened (see tests/soak.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import soak
import soak_runs

if TYPE_CHECKING:
    from conftest import Start


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
def test_a_rank_that_lives_stays(start: Start, tmp_path: Path) -> None:
    """The other tests compare losses, whether ranks stay or not."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    launch, *words = soak_runs.command(run, text, 30)
    words = [*words[words.index("-m") :], "train.memory_checkpoint_interval=2"]
    options = ["--elastic", "--stay", "60", "--env", "OMP_NUM_THREADS=1"]
    process = start(launch, "-n", "2", *options, sys.executable, *words)
    assert soak_runs.wait_for(lambda: soak_runs.last_step(run) >= 8 and soak_runs.living(run), process)
    before = soak_runs.living(run)
    os.kill(before[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    after = json.loads((run / "launch.json").read_text())["pids"]
    assert after[1] == before[1]
    assert after[0] != before[0]
    (fault,) = json.loads((run / "run.json").read_text())["recoveries"]
    assert [fault[key] for key in ("rank", "stayed", "started", "source")] == [0, 1, 1, "memory"]
    assert [line[0] for line in soak_runs.figures(run)] == [*range(1, 31)]


@pytest.mark.timeout(300)
def test_with_fewer_ranks_until_the_node_is_back_the_losses_are_the_same(start: Start, tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    (tmp_path / "hosts").write_text(f"{os.uname().nodename}\nlocalhost\n")
    launch, *words = soak_runs.command(run, text, 100_000)
    words = [*words[words.index("-m") :], "train.backend=DDP", "train.checkpoint_interval=100000", "model.dropout=0"]
    words += ["schedule=constant", "train.memory_checkpoint_interval=2"]
    nodes = ["--hostfile", str(tmp_path / "hosts"), "--launcher-args", "-launcher fork"]
    process = start(launch, "-n", "2", "--elastic", "1", "--env", "OMP_NUM_THREADS=1", *nodes, sys.executable, *words)
    assert soak_runs.wait_for(lambda: soak_runs.last_step(run) >= 4 and soak_runs.living(run), process)
    os.kill(soak_runs.parent(soak_runs.living(run)[1]), signal.SIGKILL)

    def sizes() -> list[int]:
        """Return the numbers of ranks of the parts of the run."""
        try:
            record = json.loads((run / "run.json").read_text())
        except (OSError, ValueError):
            return []
        return [part["world"]["size"] for part in [*record.get("earlier", []), record]]

    assert soak_runs.wait_for(lambda: sizes() == [2, 1, 2], process)
    assert json.loads((run / "run.json").read_text())["resumed_from"]["source"] == "disk", "the ranks have saved"
    reached = soak_runs.last_step(run)
    assert soak_runs.wait_for(lambda: soak_runs.last_step(run) > reached, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    lines = [line for line in soak_runs.figures(run) if line]
    assert [line[0] for line in lines] == [*range(1, len(lines) + 1)]
    whole = tmp_path / "whole"
    alone = [*words, f"hydra.run.dir={whole}", f"train.max_iters={len(lines)}", "train.global_batch_size=8"]
    soak_runs.finish(whole, [sys.executable, *alone, "train.memory_checkpoint_interval=0"])
    for mine, other in zip(lines, soak_runs.figures(whole), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert json.loads((run / "run.json").read_text())["sizes"] == [1, 2]
