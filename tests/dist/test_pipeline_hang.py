"""A pipeline whose stage hangs says which ranks wait to send or receive, and for which rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)
SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import torch
import wordrun
from wordrun import dist
from wordrun.dist import stacks, watch
from wordrun.train.training import Hook

reported, report = Path("reported").absolute(), watch.Watch._report

def report_and_say_so(*words):
    report(*words)
    reported.touch()

def end_when_reported():
    while not reported.exists():
        time.sleep(0.05)
    sys.stdout.flush()
    os._exit(7)

def never_ends(module, inputs):
    time.sleep(1000)  # stage

class Culprit(Hook):
    def after_step(self, trainer):
        if trainer.step == 2 and trainer.world.rank == int(sys.argv[1]):
            next(iter(trainer.backend.parts[0].blocks.values())).register_forward_pre_hook(never_ends)

watch.Watch._report = report_and_say_so
watch.SLOW, stacks.DUMP_S = 10.0, 20.0  # on a busy machine, start-up and the first step take seconds
threading.Thread(target=end_when_reported, daemon=True).start()
with dist.session() as world:
    torch.set_num_threads(1)
    words = ["hydra.run.dir=run", "data=sample", "tokenizer=byte", "tracker=jsonl", "train.dtype=fp32",
        "train.device=cpu", "train.max_iters=8", "train.eval_interval=0", "train.sample_tokens=0",
        "train.checkpoint_interval=0", "train.compile=false", "train.hang_s=3", "train.backend=PP",
        f"backend.pp={world.size}", "model.batch_size=4", "model.n_layer=4", "model.n_head=2", "model.n_embd=16",
        "model.block_size=16"]
    cfg = dist.share(wordrun.compose(words) if world.rank == 0 else None, world)
    with wordrun.Trainer(cfg, world, hooks=[Culprit()]) as trainer:
        trainer.train()
"""


@pytest.mark.parametrize(("size", "asleep", "others"), [(2, 1, "rank 0 waits"), (4, 2, "ranks 0-1, 3 wait")])
def test_a_stage_that_hangs_is_named(ranks: Any, tmp_path: Path, size: int, asleep: int, others: str) -> None:
    (tmp_path / "hang.py").write_text(SCRIPT)
    done = ranks(size, "hang.py", str(asleep), under="fork", timeout=60)
    messages = re.findall(r"no progress for .*", done.stdout)
    assert len(messages) == 1, done.stdout + done.stderr  # the status depends on which rank ends first
    message = messages[0]
    assert f"{others} in a pipeline's send or receive for rank {asleep}; " in message
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith("# stage"))
    where = rf"rank {asleep} \([^);]*; pp={asleep}\) is at hang\.py:{line} in never_ends \(training after 2 steps\)"
    assert re.search(where, message), message
