"""SIGKILL to ranks and launch at random moments: the run continues as if nothing had happened (see tests/soak.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import soak
import soak_runs

if TYPE_CHECKING:
    from conftest import Start


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


# Trains at most ten steps a second: while a node starts again, the others would take hundreds, which a run without
# faults had to repeat. As the command's name is wordrun, guardians import as much for its ranks.
PACED = """
import sys, time
from wordrun.cli import main
from wordrun.train.trainer import Trainer
take = Trainer._micro_batches
def paced(trainer):
    time.sleep(0.1)  # counts as a step's time, by which ranks decide how often they ask each other about signals
    return take(trainer)
Trainer._micro_batches = paced
sys.exit(main())
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


def test_a_rank_that_lives_stays(start: Start, tmp_path: Path) -> None:
    """The other tests compare losses, whether ranks stay or not."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    launch, *words = soak_runs.command(run, text, 30)
    # One on disk would be newer if the rank were killed just before that in memory is complete.
    words = [*words[words.index("-m") :], "train.memory_checkpoint_interval=2", "train.checkpoint_interval=100000"]
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


def lose_a_node_until_it_is_back(start: Start, home: Path, *words: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Train on two nodes, on one, and again on two; return the options, and what run.json says of each part."""
    text, run = home / "text.txt", home / "run"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    (home / "hosts").write_text(f"{os.uname().nodename}\nlocalhost\n")
    (home / "wordrun").write_text(PACED)
    launch, *plain = soak_runs.command(run, text, 100_000)
    options = [*soak_runs.options(plain), "model.dropout=0", "schedule=constant", *words]
    nodes = ["--hostfile", str(home / "hosts"), "--launcher-args", "-launcher fork"]
    python = [sys.executable, str(home / "wordrun")]
    process = start(launch, "-n", "2", "--elastic", "1", "--env", "OMP_NUM_THREADS=1", *nodes, *python, *options)
    begun = lambda: soak_runs.last_step(run) >= 4 and soak_runs.living(run)  # noqa: E731
    on_disk = "train.checkpoint_interval=2" in words
    assert soak_runs.wait_for(lambda: begun() and (not on_disk or any(run.glob("checkpoints/step-*"))), process)
    os.kill(soak_runs.parent(soak_runs.living(run)[1]), signal.SIGKILL)

    def parts() -> list[dict[str, Any]]:
        try:
            record = json.loads((run / "run.json").read_text())
        except (OSError, ValueError):
            return []
        return [*record.get("earlier", []), record]

    assert soak_runs.wait_for(lambda: [part["world"]["size"] for part in parts()] == [2, 1, 2], process)
    reached = soak_runs.last_step(run)
    assert soak_runs.wait_for(lambda: soak_runs.last_step(run) > reached + 4, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    found = parts()
    assert found[2]["resumed_from"]["source"] == "disk", "the ranks have saved"
    assert [line[0] for line in soak_runs.figures(run)] == [*range(1, found[2]["steps"] + 1)]
    return options, found


def test_with_fewer_ranks_until_the_node_is_back_the_losses_are_the_same(
    start: Start, alone: Callable[..., None], tmp_path: Path
) -> None:
    every = ["train.checkpoint_interval=100000", "train.memory_checkpoint_interval=2"]
    words, parts = lose_a_node_until_it_is_back(start, tmp_path, "train.backend=DDP", *every)
    steps = parts[2]["steps"]
    alone([*words, f"hydra.run.dir={tmp_path}/whole", f"train.max_iters={steps}", "train.global_batch_size=8"], n=1)
    mine, other = (soak_runs.figures(tmp_path / name) for name in ("run", "whole"))
    for line, expected in zip(mine, other, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    assert parts[2]["sizes"] == [1, 2]


def test_an_island_that_is_lost_joins_again(start: Start, alone: Callable[..., None], tmp_path: Path) -> None:
    """Each part is what the same ranks make of the same checkpoint alone; see test_diloco.py for what that is."""
    every = ["train.checkpoint_interval=2", "train.keep_checkpoints=1000"]
    words, parts = lose_a_node_until_it_is_back(start, tmp_path, "train.backend=diloco", "backend.sync_every=4", *every)
    run, log = soak_runs.figures(tmp_path / "run"), (tmp_path / "run" / "log.txt").read_text()
    assert "the checkpoint has 2 islands, this run has 1" in log
    for ranks, part in ((1, parts[1]), (2, parts[2])):
        begin, end, again = part["resumed_from"]["step"], part["steps"], tmp_path / f"again-{ranks}"
        own = [f"train.resume={tmp_path}/run/checkpoints/step-{begin:08d}", f"hydra.run.dir={again}"]
        alone([*words, *own, f"train.max_iters={end}", "train.global_batch_size=8"], n=ranks)
        assert end - begin > 1, "there is something to compare"
        assert soak_runs.figures(again)[begin:] == run[begin:end]
