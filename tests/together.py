"""Trains several configs on the same ranks, one after the other, on texts that are made up."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
import torch
import wordrun
from wordrun import dist
from wordrun.dist import torch_private

with dist.session() as world:
    torch.set_num_threads(1)
    for name, words in json.load(open(sys.argv[1])).items():
        cfg = wordrun.compose([*words, f"hydra.run.dir={name}"]) if world.rank == 0 else None
        with wordrun.Trainer(dist.broadcast(cfg, world), world) as trainer:
            trainer.train()
"""
ALIGNED = """
from wordrun.config import rules
from wordrun.train import language

def vocab_multiple(cfg, tp, on_cpu):
    return rules.vocab_multiple(cfg, tp, on_cpu="aligned" not in cfg.run_dir)  # as on an accelerator

language.vocab_multiple = vocab_multiple
"""
"""For ``before``: the vocabulary of runs with "aligned" in their names is padded."""


def train(ranks: Any, n: int, runs: Mapping[str, Sequence[str]], before: str = "", after: str = "") -> None:
    """Train every one of ``runs`` on ``n`` ranks; their names are directories.

    Args:
        ranks: the fixture.
        n: number of ranks.
        runs: overrides by name; data.path is documents.jsonl or text.txt.
        before: code that the ranks run first, with torch and compat imported.
        after: code that they run after each training, with its trainer.
    """
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 60)
    texts = [f"The dog number {n} sleeps on.\n" * (1 + n % 3) for n in range(300)]
    Path("documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    script = SCRIPT.replace("with dist", f"{before}\nwith dist", 1)
    Path("script.py").write_text(script + textwrap.indent(after, 12 * " "))
    Path("runs.json").write_text(json.dumps(runs))
    done = ranks(n, "script.py", "runs.json", under="fork", timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:6000]
