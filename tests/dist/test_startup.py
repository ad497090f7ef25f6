"""A run imports what it needs, and no more: each of these modules takes a second or more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

HEAVY = (
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "wandb",
    "pyinstrument", "transformers",
)  # fmt: skip
SCRIPT = f"""
import subprocess, sys
from wordrun.cli import main

status = main(sys.argv[1:])
unavoidable = "import sys, torch; print(*[name for name in {HEAVY!r} if name in sys.modules])"
by_torch = subprocess.run([sys.executable, "-c", unavoidable], capture_output=True, text=True).stdout.split()
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules and name not in by_torch])
raise SystemExit(status)
"""
RUN = (
    "data=sample", "tracker=jsonl", "model.n_layer=1", "model.n_head=1", "model.n_embd=16", "model.block_size=16",
    "model.batch_size=2", "train.max_iters=3", "train.eval_iters=1", "train.sample_tokens=4", "train.device=cpu",
)  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_one_rank_imports_no_compiler(optimizer: str, command: Command, tmp_path: Path) -> None:
    """It trains, evaluates, saves a checkpoint, resumes from it and samples."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = (*RUN, f"optimizer={optimizer}", "hydra.run.dir=run")
    done = command(sys.executable, "script.py", *words)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "imported:"), done.stdout + done.stderr
    done = command(sys.executable, "script.py", *words, "train.max_iters=5", "train.resume=run")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "imported:"), done.stdout + done.stderr


def test_ranks_of_ddp_import_no_compiler(ranks: Command, tmp_path: Path) -> None:
    """Neither to construct the wrapper nor to call it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(2, "script.py", *RUN, "hydra.run.dir=run", under="torchrun")
    found = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert (done.returncode, found) == (0, ["imported:"] * 2), done.stdout + done.stderr
