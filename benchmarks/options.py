"""The effect of each option of model=modern, and of the optimizer, on the loss of tiny Shakespeare after few steps.

    python benchmarks/options.py
    python benchmarks/options.py --steps 300 --seeds 1 2 3

Each row is a run with one option more than the plain model, then all of them, then all but one, then all with another
value of one. Losses are means over the whole validation split, so they do not depend on the machine; seconds are
processor seconds of the whole process, evaluation and start-up included, which do not depend on its other load.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from vs_nanogpt import run

SETTING = shlex.split("""
    data=shakespeare data.offline=error tracker=jsonl train.sample_tokens=0 train.eval_iters=null
    train.dtype=fp32 model=modern model.batch_size=12 model.block_size=64 optimizer.warmup_iters=10
    optimizer.grad_clip=1
""")
PLAIN = {
    "mlp": "gelu",
    "qk_norm": "false",
    "norm_weights": "true",
    "embed_norm": "false",
    "zero_init": "false",
    "softcap": "0",
    "value_layers": "[]",
    "ngram_rows": "[]",
}
ADAMW = ["optimizer=adamw", "optimizer.learning_rate=4e-3", "schedule=cosine"]
OPTIONS = {
    "linear schedule to zero": ["schedule=linear", "optimizer.min_lr=0"],
    "Muon": ["optimizer=muon", "optimizer.learning_rate=0.02", "optimizer.adamw_lr=0.01", "optimizer.weight_decay=0"],
    "squared ReLU": ["model.mlp=relu2"],
    "QK norm": ["model.qk_norm=true"],
    "norms without weights": ["model.norm_weights=false"],
    "norm of the embedding": ["model.embed_norm=true"],
    "output projections of zeros": ["model.zero_init=true"],
    "soft-cap 15": ["model.softcap=15"],
    "value embeddings, first and last block": ["model.value_layers=[0,-1]"],
    "tied output layer": ["model.tie=true"],
    "n-gram embeddings, 500 rows for 2 and for 3": ["model.ngram_rows=[500,500]"],
}
WORSE = ("tied output layer",)
"""Not among all options together."""
DECAY = "optimizer.weight_decay=0.1"
CHANGED = {
    "SwiGLU, as many weights": ["model.mlp=swiglu", "model.n_hidden=341"],
    "Muon: split=heads": ["optimizer.split=heads"],
    "Muon: no Nesterov momentum": ["optimizer.nesterov=false"],
    "Muon: scale=spectral, learning rate 0.05": ["optimizer.scale=spectral", "optimizer.learning_rate=0.05"],
    "Muon: momentum from 0.85 over 100 steps": ["optimizer.momentum_warmup=100"],
    "Muon: 3 Newton-Schulz iterations": ["optimizer.ns_steps=3"],
    "Muon: 7 Newton-Schulz iterations": ["optimizer.ns_steps=7"],
    "Muon: weight decay 0.1": [DECAY],
    "Muon: cautious weight decay 0.1": [DECAY, "optimizer.cautious=true"],
}
"""What differs from all options together in each of the last rows."""


def measure(out: Path, words: Sequence[str], steps: int, seed: int) -> tuple[float, float]:
    """Return the loss and the processor seconds of a run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    plain = [f"model.{key}={value}" for key, value in PLAIN.items()]
    options = [f"train.max_iters={steps}", f"train.eval_interval={steps}", f"train.seed={seed}", f"hydra.run.dir={out}"]
    run([sys.executable, "-m", "wordrun", *SETTING, *ADAMW, *plain, *options, *words])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loss: float = json.loads((out / "run.json").read_text())["val_loss"]
    return loss, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (default 200)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="seeds of the runs of each row")
    parser.add_argument("--rows", default="", help="only rows whose name matches this regular expression")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    together = {name: words for name, words in OPTIONS.items() if name not in WORSE}
    rows = {"plain": [], **{f"+ {name}": words for name, words in OPTIONS.items()}}
    best = [*chain(*together.values())]
    rows["all, but the tied output layer"] = best
    for left in together:
        rows[f"- {left}"] = [*chain(*(words for name, words in together.items() if name != left))]
    rows |= {f"with {name}": [*best, *words] for name, words in CHANGED.items()}
    print(f"| option | loss after {args.steps} steps | processor seconds |\n|---|---|---|")
    for name, words in rows.items():
        if not re.search(args.rows, name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            results = [measure(Path(scratch) / str(seed), words, args.steps, seed) for seed in args.seeds]
        losses, seconds = zip(*results, strict=True)
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        print(f"| {name} | {statistics.mean(losses):.3f} ({each}) | {statistics.mean(seconds):.1f} |", flush=True)


if __name__ == "__main__":
    main()
