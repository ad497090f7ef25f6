"""Checkpoints in memory: killed at any moment, or with a node lost, a run resumes as if nothing had happened."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from wordrun.checkpoint.folder import all_in, file_of

pytestmark = pytest.mark.timeout(300)

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
STEPS = 12
SMALL = shlex.split("""
    model=nano
    data=text data.path=text.txt tokenizer=char tracker=jsonl train.dtype=fp32 train.device=cpu
    train.log_interval=1 train.eval_interval=0 train.sample_tokens=0 train.global_batch_size=8
    optimizer.warmup_iters=2 train.save_best=false train.check_memory=false train.resume=auto
    model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=16 model.bias=true
    train.checkpoint_interval=1000
""")
# Each simulated node has a file system of its own. A rank kills itself at the moment that the plan names; the others
# follow, as a launcher would have it.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from unittest import mock
import torch
import wordrun
from wordrun import dist
from wordrun.checkpoint.memory import file
from wordrun.checkpoint.memory.node import NodeMemory
from wordrun.checkpoint.memory.peers import Peers
from wordrun.train.hooks import Hook
from wordrun.checkpoint.memory.copies import MemoryCheckpoints

plan = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
node = plan["nodes"][rank]
os.environ["WORDRUN_SHM"] = str(Path("memory", node).absolute())
Path("memory", node).mkdir(parents=True, exist_ok=True)
FUNCTIONS = {
    "copy": (file, "write"), "checksums": (file, "_complete"), "publish": (NodeMemory, "publish"),
    "remove": (NodeMemory, "keep_only"), "fetch": (Peers, "fetch"),
}

def die():
    Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)

def fatal(function, left):
    def call(*args, **options):
        left.pop()
        if not left and plan["before"]:
            die()
        result = function(*args, **options)
        if not left:
            die()
        return result
    return call

class Step(Hook):
    def before_step(self, trainer):
        if trainer.step == plan.get("step"):
            trainer.hooks["MemoryCheckpoint"].saves.wait()
            trainer.checkpoints.wait()
            torch.distributed.barrier()
            die()

if plan.get("moment") in FUNCTIONS and rank == plan["rank"]:
    owner, name = FUNCTIONS[plan["moment"]]
    setattr(owner, name, fatal(getattr(owner, name), [None] * plan["call"]))
with dist.session() as world:
    torch.set_num_threads(1)
    cfg = dist.broadcast(wordrun.compose(plan["words"]) if world.rank == 0 else None, world)
    with wordrun.Trainer(cfg, world, hooks=[Step()]) as trainer:
        trainer.train()
"""


class Job:
    """A training that is relaunched several times."""

    def __init__(self, ranks: Any, home: Path, nodes: str, words: list[str]) -> None:
        self.ranks, self.home, self.nodes, self.words = ranks, home, nodes, words
        (home / "text.txt").write_text(TEXT * 60)
        (home / "script.py").write_text(SCRIPT)

    def launch(self, run: str = "run", *words: str, nodes: str = "", **plan: Any) -> Any:
        nodes = nodes or self.nodes
        options = [*SMALL, *self.words, f"train.max_iters={STEPS}", f"hydra.run.dir={run}", *words]
        plan = {"words": options, "nodes": nodes, **plan}
        done = self.ranks(len(nodes), "script.py", json.dumps(plan), under="fork", timeout=120)
        if plan.keys() & {"moment", "step"}:
            assert done.returncode != 0
            (self.home / "killed").unlink()  # fails if the moment never came
        else:
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done

    def memory(self, node: str) -> Path:
        """Return the one checkpoint in the memory of a node."""
        (found,) = self.home.glob(f"memory/{node}/*/*/step-*")
        return found


KEYS = ("step", "loss", "lr", "grad_norm", "tokens")


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return everything in metrics.jsonl that does not depend on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[key] for key in KEYS) for line in lines]


def record(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return content


MOMENTS = [
    ("copy", True),
    ("checksums", True),
    ("publish", True),
    ("publish", False),
    ("remove", False),
    ("fetch", False),
]


def test_killed_at_any_moment_of_a_save_it_resumes_from_memory_to_the_bit(ranks: Any, tmp_path: Path) -> None:
    """Every save interrupted leaves a complete checkpoint, at most two intervals old; the losses are one curve."""
    interval, dice = 2, random.Random(20261123)
    job = Job(
        ranks,
        tmp_path,
        "ab",
        ["model.batch_size=4", "model.dropout=0.1", f"train.memory_checkpoint_interval={interval}"],
    )
    job.launch("whole")
    reached = 0
    for moment, before in MOMENTS:
        job.launch(moment=moment, before=before, rank=dice.randrange(2), call=1 if reached else 2)
        last = figures(tmp_path / "run")[-1][0]
        if reached:
            begun = record(tmp_path / "run")["resumed_from"]
            assert begun["source"] == "memory"
            assert begun["step"] >= reached - 2 * interval
        reached = last
    done = job.launch()
    assert "resumed from memory at step" in done.stdout + done.stderr
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert not list(tmp_path.glob("memory/*/*/*")), "checkpoints of finished runs are left in memory"


def test_copies_replace_a_lost_node_on_any_layout(ranks: Any, tmp_path: Path) -> None:
    """Four ranks on two nodes: one node's memory is lost or damaged, ranks move, or become fewer."""
    job = Job(ranks, tmp_path, "aabb", ["train.memory_checkpoint_interval=3"])
    fsdp = ["train.backend=FSDP", "model.batch_size=2"]
    job.launch("whole", *fsdp)
    job.launch("run", *fsdp, step=7)
    for part in ("run", "memory"):
        shutil.copytree(tmp_path / part, tmp_path / f"{part}-after-the-kill")

    def again(*words: str, nodes: str = "", change: Any = None) -> str:
        for part in ("run", "memory"):
            shutil.rmtree(tmp_path / part)
            shutil.copytree(tmp_path / f"{part}-after-the-kill", tmp_path / part)
        if change is not None:
            change()
        done = job.launch("run", *(words or fsdp), nodes=nodes)
        output: str = done.stdout + done.stderr
        return output

    def lose_a_node() -> None:
        shutil.rmtree(tmp_path / "memory" / "a")

    def damage() -> None:
        file = job.memory("b") / file_of(3)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    def lose_both_copies() -> None:
        (job.memory("a") / file_of(0)).unlink()
        (job.memory("b") / file_of(0)).unlink()

    found = "resumed from memory at step 6; none is on disk"
    assert found in again(nodes="ccbb", change=lose_a_node)  # c takes the place of a
    assert record(tmp_path / "run")["resumed_from"]["source"] == "memory"
    whole = figures(tmp_path / "whole")
    assert figures(tmp_path / "run") == whole
    fewer = ["train.backend=DDP", "model.batch_size=4"]
    for change, nodes in ((lose_a_node, "bb"), (damage, "ba")):
        assert found in again(*fewer, nodes=nodes, change=change)
        for line, expected in zip(figures(tmp_path / "run"), whole, strict=True):
            assert line == pytest.approx(expected, rel=1e-5), change.__name__
    why = (
        "starting over at step 0, because no checkpoint is on disk, and the checkpoint of step 6 in memory lacks the "
        "share of rank 0"
    )
    assert why in again(*fewer, nodes="ab", change=lose_both_copies)
    assert record(tmp_path / "run")["resumed_from"] == {"run": str(tmp_path / "run"), "step": 0, "source": "disk"}
    assert len(figures(tmp_path / "run")) == STEPS


def test_the_disk_is_used_if_memory_has_no_newer_step_and_it_is_said(ranks: Any, tmp_path: Path) -> None:
    words = ["model.batch_size=8", "train.memory_checkpoint_interval=2", "train.checkpoint_interval=5"]
    job = Job(ranks, tmp_path, "a", words)
    job.launch(step=7)
    assert [each.step for each in all_in(tmp_path / "run")] == [5]
    shutil.rmtree(tmp_path / "memory")
    output = job.launch(step=9).stdout + job.launch().stdout
    assert "step-00000005 at step 5, because no checkpoint of this run is in memory" in output
    assert "resumed from memory at step 8; the newest checkpoint on disk is of step 5" in output
    assert len(re.findall("without copies, because all ranks are on one node", output)) == 2
    assert not list(tmp_path.glob("memory/*/*/*"))
