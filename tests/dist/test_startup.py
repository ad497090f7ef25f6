"""A run imports what it needs, and no more: each of these modules takes a second or more."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Command

HEAVY = ("wandb", "pyinstrument", "transformers")
SCRIPT = """
import json, sys
from wordrun.cli import main

heavy, runs = json.load(open(sys.argv[1]))
for words in runs:
    if status := main(words):
        raise SystemExit(status)
    print("imported:", *[name for name in heavy if name in sys.modules], flush=True)
"""
RUN = tuple(
    shlex.split("""
    model=nano
    data=sample tracker=jsonl model.n_layer=1 model.n_head=1 model.n_embd=16 model.block_size=16
    model.batch_size=2 train.max_iters=3 train.eval_iters=1 train.sample_tokens=4 train.device=cpu
""")
)


def imported(start: Command, *runs: Sequence[str]) -> list[str]:
    """Start a process that trains each of ``runs``, and return what it had imported after each."""
    unavoidable = "import sys, torch; print(*sys.modules)"  # some versions of torch import some of these themselves
    done = subprocess.run([sys.executable, "-c", unavoidable], capture_output=True, text=True, check=True)
    heavy = [name for name in HEAVY if name not in done.stdout.split()]
    Path("script.py").write_text(SCRIPT)
    Path("runs.json").write_text(json.dumps([heavy, [[*RUN, *words] for words in runs]]))
    done = start("script.py", "runs.json", timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("imported:")]


def test_one_rank_imports_only_what_it_needs(command: Command) -> None:
    """It trains, evaluates, saves a checkpoint, resumes from it and samples."""
    runs = [
        [f"optimizer={name}", f"hydra.run.dir={name}", *more]
        for name in ("adamw", "sgd", "muon")
        for more in ([], ["train.max_iters=5", f"train.resume={name}"])
    ]
    assert imported(partial(command, sys.executable), *runs) == ["imported:"] * 6


def test_ranks_of_ddp_import_only_what_they_need(ranks: Command) -> None:
    assert imported(partial(ranks, 2, under="torchrun"), ["hydra.run.dir=run"]) == ["imported:"] * 2
