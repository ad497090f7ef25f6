"""Small runs on the device under test."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRY = os.environ.get("WORDRUN_GPU_TESTS") == "cpu"
"""Whether to run on the CPU, to try the tests themselves."""
SMALL = [
    *shlex.split("""
    model=nano
    data=sample tracker=jsonl train.max_iters=20 train.log_interval=1 train.eval_iters=2
    train.sample_tokens=0 train.checkpoint_interval=0 train.save_best=false optimizer.warmup_iters=2
    model.n_layer=2 model.n_head=2 model.n_embd=64
"""),
    *(["train.device=cpu"] if DRY else []),
]


@dataclass
class Ran:
    """A finished run."""

    folder: Path
    lines: list[dict[str, Any]]
    """The lines of metrics with a training loss."""
    record: dict[str, Any]
    """Contents of run.json."""

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]


Train = Callable[..., Ran]


def ran(folder: Path) -> Ran:
    """Return the run in ``folder``."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Ran(folder, [line for line in lines if "loss" in line], json.loads((folder / "run.json").read_text()))
