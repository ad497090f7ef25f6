"""The slowest rank is named, although all ranks wait for it: its data, its forward or its backward pass."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

SLEEP_S = 0.2
BACKENDS = ["DDP", *(["FSDP"] if hasattr(FSDPModule, "set_custom_all_gather") else [])]
"""Those whose collectives are timed: not FSDP's with torch 2.8 (compat.time_collectives)."""
SMALL = shlex.split("""
    model=nano
    data=sample tokenizer=byte tracker=jsonl train.dtype=fp32 train.device=cpu train.max_iters=6
    train.log_interval=3 train.eval_interval=0 train.sample_tokens=0 train.checkpoint_interval=0
    train.compile=false optimizer.gas=2 model.batch_size=1 model.n_layer=2 model.n_head=2
    model.n_embd=16 model.block_size=8
""")
SCRIPT = """
import sys, time
import torch
import wordrun
from wordrun import dist

SLEEP_S = float(sys.argv[1])

def delay(trainer, where):
    loader, block = trainer.loader, trainer.backend.parts[0].blocks["1"].mlp
    load = loader.take
    def slow(first, gas):
        time.sleep(SLEEP_S)
        return load(first, gas)
    if where == "data":
        loader.take = slow
    elif where == "forward":
        block.register_forward_pre_hook(lambda module, inputs: time.sleep(SLEEP_S / 2))  # in each micro-step
    else:
        wait = lambda gradient: time.sleep(SLEEP_S / 2)
        block.register_forward_hook(lambda module, inputs, output: output.register_hook(wait) and None)

with dist.session() as world:
    torch.set_num_threads(1)
    for backend in sys.argv[2].split(","):
        for rank, where in enumerate(("data", "forward", "backward")):
            words = [*sys.argv[3:], f"train.backend={backend}", f"hydra.run.dir={backend}-{where}"]
            cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
            with wordrun.Trainer(cfg, world) as trainer:
                if world.rank == rank:
                    delay(trainer, where)
                trainer.train()
"""


def test_the_slowest_rank_is_named(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(3, "script.py", str(SLEEP_S), ",".join(BACKENDS), *SMALL, under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    for backend in BACKENDS:
        for rank, where in enumerate(("data", "forward", "backward")):
            text = (tmp_path / f"{backend}-{where}/metrics.jsonl").read_text()
            line = json.loads(text.splitlines()[2])  # in the first steps, DDP also exchanges its buckets' contents
            assert line["step"] == 6
            assert (line["slowest_rank"], backend, where) == (rank, backend, where), line
            assert 0.6 * SLEEP_S < line["slowest_by"] < line["dt"], line
            # The two others wait for it, and these times are means.
            assert line["dt_comm"] > 0.4 * SLEEP_S, line
            named = {"data": "dt_data", "forward": "dtf", "backward": "dtb"}[where]
            assert line[named] > 0.3 * SLEEP_S, line
            parts = ("dt_data", "dtf", "dtb", "dt_comm", "dt_optimizer")
            assert line["dt"] == pytest.approx(sum(line[name] for name in parts), rel=1e-3)
