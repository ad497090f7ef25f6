"""Islands that exchange weights: equal to DDP where they should be, resumed to the bit, with few bytes sent."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

SMALL = shlex.split("""
    model=nano
    data=sample tokenizer=char tracker=jsonl train.dtype=fp32 train.device=cpu train.max_iters=12
    train.log_interval=1 train.eval_interval=4 train.eval_iters=1 train.sample_tokens=0
    train.checkpoint_interval=0 train.save_best=false optimizer.warmup_iters=2
    optimizer.learning_rate=2e-3 train.global_batch_size=8 model.batch_size=2 model.n_layer=2
    model.n_head=2 model.n_embd=16 model.block_size=16
""")
SAVED = ["train.checkpoint_interval=2", "train.keep_checkpoints=9"]
DILOCO = ["train.backend=diloco", "backend.sync_every=6"]
PLAIN = ["optimizer=sgd", "optimizer.grad_clip=0", "optimizer.learning_rate=0.1"]
EQUAL = [*PLAIN, "train.backend=diloco", "backend.sync_every=1", "backend.outer_lr=1", "backend.outer_momentum=0"]
SCRIPT = """
import json, sys
import torch
import wordrun
from wordrun import dist
from wordrun.common.errors import ConfigError

with dist.session() as world:
    torch.set_num_threads(1)
    for words in json.load(open(sys.argv[1])):
        cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
        try:
            with wordrun.Trainer(cfg, world) as trainer:
                trainer.train()
        except ConfigError as error:  # on all ranks
            if world.rank == 0:
                open("refused.txt", "a").write(f"{error}\\n")
            torch.distributed.barrier()  # some may still be making the groups
"""


def train(ranks: Any, n: int, runs: dict[str, list[str]], home: Path) -> None:
    """Train every one of ``runs`` on ``n`` ranks, one after the other in the same processes."""
    (home / "script.py").write_text(SCRIPT)
    (home / "runs.json").write_text(json.dumps([[*SMALL, f"hydra.run.dir={k}", *w] for k, w in runs.items()]))
    done = ranks(n, "script.py", "runs.json", under="fork", timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def figures(run_dir: str, first: int = 1) -> list[float]:
    """Return all losses from step ``first`` on, training and validation, in their order."""
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "val_loss") if name in line and line["step"] >= first]


def resume(run: str, step: int) -> str:
    return f"train.resume={run}/checkpoints/step-{step:08d}"


def test_two_islands(ranks: Any, tmp_path: Path) -> None:
    # Steps 4 and 8 are between two exchanges. Dropout, whose RNG states are resumed as well.
    parts = [*DILOCO, "model.dropout=0.1", "optimizer=muon", "backend.fragments=3"]
    runs = {
        "ddp": [*PLAIN, "train.backend=DDP"],
        "equal": EQUAL,
        "whole": [*DILOCO, *SAVED],
        "whole-on": [*DILOCO, resume("whole", 4)],
        "parts": [*parts, *SAVED],
        "parts-on": [*parts, resume("parts", 8)],
        "one": [*DILOCO, "backend.islands=1", "backend.outer_lr=1", "backend.outer_momentum=0"],
        "adamw": [],
        "to-ddp": [resume("whole", 6)],
        "refused": [resume("whole", 4)],
    }
    train(ranks, 2, runs, tmp_path)
    assert figures("equal") == pytest.approx(figures("ddp"), rel=1e-5)
    assert figures("ddp")[-1] < figures("ddp")[0] - 0.1, "the model should have learned something to compare"
    assert figures("whole-on") == figures("whole")
    assert figures("parts-on") == figures("parts")
    # One island trains as its inner backend, with outer steps that change nothing.
    one, adamw = figures("one"), figures("adamw")
    assert figures("whole")[4] == one[4], "between two exchanges, an evaluation is of the outer weights"
    for at in (9, 4):  # which are the initial ones at step 4, and those of step 6 at step 8
        assert one.pop(at) > adamw.pop(at)
    assert one == pytest.approx(adamw, rel=1e-5)
    assert "has one island, so nothing is exchanged" in Path("one/log.txt").read_text()
    # Another backend continues from the outer weights after an exchange, and not between two.
    assert figures("to-ddp", 7)[0] == pytest.approx(figures("whole", 7)[0], rel=1e-5)
    refused = Path("refused.txt").read_text()
    assert refused.count("was saved between two exchanges of 2 islands") == 1
    assert "resume with train.backend=diloco, resume from" in refused


def test_islands_of_two_ranks(ranks: Any, tmp_path: Path) -> None:
    two = [*DILOCO, "backend.islands=2"]
    fsdp = [*two, "backend.inner=FSDP", "model=llama_debug", "model.n_kv_head=2", "model.n_hidden=40"]
    llama = fsdp[-3:]
    runs = {
        "ddp": [*two, *llama],
        "fsdp": [*fsdp, *SAVED],
        "fsdp-on": [*fsdp, resume("fsdp", 4)],
        # The same step between two exchanges, with another inner backend; and after one, with other islands.
        "to-ddp": [*two, *llama, resume("fsdp", 4)],
        "to-four": [*DILOCO, *llama, *SAVED, resume("fsdp", 6)],
        # Between two exchanges, two islands more, and two less.
        "joined": [*DILOCO, *llama, resume("fsdp", 4)],
        "left": [*two, *llama, resume("to-four", 8)],
    }
    train(ranks, 4, runs, tmp_path)
    assert figures("fsdp") == pytest.approx(figures("ddp"), rel=1e-5)
    assert figures("fsdp-on") == figures("fsdp")
    assert figures("to-ddp", 5) == pytest.approx(figures("fsdp", 5), rel=1e-5)
    assert figures("to-four", 7)[0] == pytest.approx(figures("fsdp", 7)[0], rel=1e-5)
    assert figures("to-four")[-1] == pytest.approx(figures("fsdp")[-1], rel=0.02)
    # There was no exchange before step 4, so the islands that join begin with the initial weights.
    first, fourth = figures("fsdp")[0], figures("fsdp", 5)[0]
    assert figures("joined", 5)[0] == pytest.approx((first + fourth) / 2, rel=0.01)
    assert first - fourth > 0.05
    assert figures("left", 9)[-1] == pytest.approx(figures("to-four")[-1], rel=0.02)
    assert not Path("refused.txt").exists()


def test_a_thirtieth_of_the_bytes(ranks: Any, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "diloco.py"
    small = shlex.split("""
        data=sample train.max_iters=240 train.eval_interval=240 model.n_layer=2 model.n_head=2
        model.n_embd=48 model.block_size=32
    """)
    names = ["DDP", "diloco, every 30 steps"]
    done = ranks(2, script, *small, "--json", "found.json", "--runs", *names, under="fork", timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ddp, diloco = (json.loads(Path("found.json").read_text())[name] for name in names)
    # Between two ranks, an all-reduce sends every gradient once. Log lines and headers come on top.
    assert 1 < ddp["bytes"] / (4 * ddp["parameters"]) < 1.02
    assert 1 / 30 < diloco["bytes"] / ddp["bytes"] < 1.1 / 30
    assert ddp["loss"] < 2.9, "the model should have learned something to compare"
    assert diloco["loss"] < 1.01 * ddp["loss"]
