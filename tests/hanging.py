"""Runs that hang on purpose, and end as soon as there is a report about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
BEGIN = """
import math, os, re, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed
import wordrun
from wordrun import dist
from wordrun.dist.hang import stacks
from wordrun.dist.hang import watch
from wordrun.train.hooks.base import Hook

kind, *words = sys.argv[1:]
reported, report = Path("reported").absolute(), watch.Watch._report
reached, limit = threading.Event(), watch.Watch.limit.fget

def report_and_say_so(*words):
    report(*words)
    sys.stdout.flush()
    reported.touch()

def end_when_reported():
    while not reported.exists():
        time.sleep(0.05)
    os._exit(1)

def reach():
    reached.set()
    watch.mark()

watch.Watch._report = report_and_say_so
# On a busy machine any step may take seconds.
watch.Watch.limit = property(lambda self: limit(self) if reached.is_set() else math.inf)
stacks.DUMP_S = 20.0
threading.Thread(target=end_when_reported, daemon=True).start()
"""
END = """
with dist.session() as world:
    torch.set_num_threads(1)
    words = ["hydra.run.dir=run", "model=nano", "data=text", "data.path=text.txt", "tokenizer=char", "tracker=jsonl",
        "train.dtype=fp32", "train.device=cpu", "train.max_iters=8", "train.eval_interval=4", "train.eval_iters=1",
        "train.sample_tokens=0", "train.checkpoint_interval=4", "train.save_best=false", "train.hang_s=2",
        "model.batch_size=2", "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16", *words]
    cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
    with wordrun.Trainer(cfg, world, hooks=[Culprit()]) as trainer:
        trainer.train()
"""


def script(culprit: str) -> str:
    """Return the script of a run with the hook ``Culprit``, which calls ``reach()`` where a hang is to be noticed."""
    return f"{BEGIN}{culprit}{END}"


def run(ranks: Any, n: int, culprit: str, kind: str, *words: str, **options: Any) -> tuple[str, str]:
    """Run it on ``n`` ranks with overrides ``words``; return the one message about the hang, and the report."""
    Path("text.txt").write_text(50 * TEXT)
    Path("hang.py").write_text(script(culprit))
    done = ranks(n, "hang.py", kind, *words, **{"under": "fork", "timeout": 60, **options})
    assert Path("reported").exists(), done.stdout + done.stderr
    messages = re.findall(r"no progress for .*", done.stdout)
    assert len(messages) == 1, done.stdout + done.stderr
    (report,) = Path("run/failures").glob("hang-*.txt")  # a rank may fail as another ends
    return messages[0], report.read_text()


def line_of(comment: str, text: str) -> int:
    """Return the number of the line of ``text`` with a comment."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {comment}"))
