"""Any number of ranks, and any split into micro-steps, gives the losses of one process."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

SMALL = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.dtype=fp32 train.global_batch_size=8 train.max_iters=20
    train.log_interval=1 train.eval_interval=10 train.eval_iters=3 train.sample_tokens=0
    train.save_best=false optimizer.warmup_iters=2 optimizer.learning_rate=2e-3 model.n_layer=2
    model.n_head=2 model.n_embd=32 model.block_size=32
""")


def losses(ranks: Any, n: int, batch_size: int, run_dir: Path) -> list[tuple[str, float]]:
    """Train on ``n`` ranks and return every loss in its order, training and validation."""
    words = [*SMALL, f"model.batch_size={batch_size}", f"hydra.run.dir={run_dir}"]
    done = ranks(n, "-m", "wordrun", *words, under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(name, line[name]) for line in lines for name in ("loss", "val_loss") if name in line]


def test_losses_are_those_of_one_process(ranks: Any, tmp_path: Path) -> None:
    one = losses(ranks, 1, 8, tmp_path / "one")
    assert len(one) == 22
    assert one[0][1] > one[-1][1] + 0.4, "the model should have learned something to compare"
    # ranks x sequences per micro-step; the rest of the 8 are micro-steps
    for n, batch_size in ((2, 1), (4, 2)):
        many = losses(ranks, n, batch_size, tmp_path / f"{n}x{batch_size}")
        assert [name for name, _ in many] == [name for name, _ in one]
        assert [loss for _, loss in many] == pytest.approx([loss for _, loss in one], rel=1e-5), f"{n} x {batch_size}"
