"""Averaged weights, statistics and spikes are the same under every layout of ranks, and resume under any other."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import together
from wordrun.checkpoint import folder as folders, index
from wordrun.checkpoint.load import find
from wordrun.dist import torch_private

pytestmark = pytest.mark.timeout(300)

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
SMALL = shlex.split("""
    model=nano
    data=text data.path=text.txt tokenizer=char tracker=jsonl train.dtype=fp32 train.device=cpu
    train.max_iters=6 train.log_interval=1 train.eval_interval=3 train.eval_iters=1 train.sample_tokens=0
    train.global_batch_size=8 optimizer.warmup_iters=0 optimizer.learning_rate=1e-3 train.save_best=false
    train.checkpoint_interval=3 train.keep_checkpoints=9 model.n_layer=2 model.n_head=2 model.n_embd=16
    model.block_size=16 model.bias=true
    hooks=[ema,statistics,spikes] hooks.ema.decay=0.8 hooks.statistics.interval=2 hooks.spikes.window=2
""")
UNCHANGED = """
from wordrun.backend.sharded_tensors import local
hook, backend = trainer.hooks["ema"], trainer.backend
before = {name: local(tensor).clone() for name, tensor in backend.model_state().items()}
with hook.applied(trainer):
    pass
for name, tensor in backend.model_state().items():
    assert torch.equal(local(tensor), before[name]), name
from unittest import mock
from wordrun.common.errors import ConfigError
from wordrun.train.hooks import checks as hook_checks
with mock.patch.object(hook, "averages", {"norm.weight": torch.zeros(16)}):  # which one stage of a pipeline has
    hook_checks.tensors(trainer)
with mock.patch.object(hook, "averages", {"hist": torch.zeros(16)}):
    try:
        hook_checks.tensors(trainer)
    except ConfigError as error:
        assert "the hook ema: tensors() has 'hist', which is not a weight" in str(error)
    else:
        raise AssertionError("a name that is no weight should be refused")
"""
ZBV = "ZBVZeroBubble" if torch_private.zbv_runs_on_cpus() else "InterleavedZeroBubble"
TP = 2 if torch_private.pipeline_takes_tensor_parallel() else 1
FSDP = ["train.backend=FSDP", "model.batch_size=4"]


def resume(run: str) -> str:
    return f"train.resume={run}/checkpoints/step-00000003"


TWO = {
    "ddp": ["train.backend=DDP", "model.batch_size=4"],
    "fsdp": FSDP,
    "kept": [*FSDP, "backend.reshard_after_forward=false"],
    "aligned": [*FSDP, "backend.cpu_offload=true"],
    "tp": ["train.backend=TP", "model.batch_size=8"],
    "pp": ["train.backend=PP", "model.batch_size=8"],
    # The first stage and the last one, with the two copies of the tied weight, are on one rank.
    "zero-bubble": ["train.backend=PP", "model.batch_size=8", f"backend.schedule={ZBV}", "model.n_layer=4"],
    "ddp-to-fsdp": [*FSDP, resume("ddp")],
    "fsdp-to-fsdp": [*FSDP, resume("fsdp")],
    "fsdp-to-ddp": ["train.backend=DDP", "model.batch_size=4", resume("fsdp")],
    "aligned-to-pp": ["train.backend=PP", "model.batch_size=8", resume("aligned")],
}
FOUR = {
    "cp-replicate": ["train.backend=FSDP", "backend.cp=2", "backend.replicate=2", "model.batch_size=4"],
    "3d": ["train.backend=3D", f"model.batch_size={4 * TP}", f"backend.tp={TP}"],
    "3d-from-tp": ["train.backend=3D", f"model.batch_size={4 * TP}", f"backend.tp={TP}", resume("tp")],
}


def train(ranks: Any, n: int, runs: dict[str, list[str]]) -> None:
    words = {name: [*SMALL, *more] for name, more in runs.items()}
    together.train(ranks, n, words, together.ALIGNED, UNCHANGED)


def lines(run: Path) -> list[dict[str, Any]]:
    """Return what hooks have added to metrics.jsonl, and the spikes that every line of metrics has."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spikes = ("step", "spike_score", "spikes")
    return [{name: line[name] for name in spikes} if "time" in line else line for line in found]


def averages(run: Path) -> dict[str, torch.Tensor]:
    return dict(find(run).weights("ema"))


FAILING = """
import sys
import wordrun
from wordrun import dist
from wordrun.train.hooks import Hook

class Watch(Hook):
    def after_step(self, trainer):
        if trainer.step == 4 and trainer.world.rank == 1:
            raise ValueError("nothing to see")

with dist.session() as world:
    cfg = dist.broadcast(wordrun.compose(sys.argv[1:]) if world.rank == 0 else None, world)
    wordrun.Trainer(cfg, world, hooks=[Watch()]).train()
"""


def test_a_hook_that_raises_on_one_rank_ends_all_and_is_named(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 60)
    (tmp_path / "script.py").write_text(FAILING)
    words = ["train.checkpoint_interval=2", "train.async_save=false", "hydra.run.dir=run"]
    done = ranks(2, "script.py", *SMALL, *FSDP, *words, under="fork", timeout=100)
    assert done.returncode == 1
    message = (
        "the hook Watch failed in after_step after 4 steps: ValueError: nothing to see (script.py:10); traceback: "
    )
    assert f"[rank 1] {message}run/failures/rank-1.txt" in done.stderr
    assert "Traceback" not in done.stderr
    assert "raise ValueError" in (tmp_path / "run/failures/rank-1.txt").read_text()
    assert f"ERROR rank 1: {message}" in (tmp_path / "run/log.txt").read_text()
    saved = [each.step for each in folders.all_in(tmp_path / "run")]
    assert saved[-1] >= 4  # the ranks agree to stop a few steps later
    assert find(tmp_path / "run").step == saved[-1]


NO_RATE = """
import sys
from dataclasses import dataclass

import wordrun
from wordrun import dist
from wordrun.config import ScheduleConfig
from wordrun.common.errors import UserError
from wordrun.train import failing
from wordrun.train.hooks import Hook

@dataclass
class OwnConfig(ScheduleConfig):
    name: str = "own"

def own(cfg, step, steps, highest, lowest):
    return highest / (3 - step)

class Rate(Hook):
    def learning_rate(self, trainer, scheduled):
        return None if trainer.step == 2 and str(trainer.world.rank) in culprits else scheduled

failing.TOGETHER_S = 2.0
wordrun.register("schedule", "own", OwnConfig, own)
with dist.session() as world:
    for culprits in ("none", "01", "1"):
        cfg = wordrun.compose([*sys.argv[1:], "schedule=own", f"hydra.run.dir=run-{culprits}"])
        trainer = wordrun.Trainer(cfg, world, hooks=[Rate()])
        try:
            trainer.train()
        except UserError as error:
            print(error, flush=True)
            if culprits == "1":  # the other rank waits for this one
                raise
        trainer.close()
"""


def test_a_learning_rate_that_fails_on_all_ranks_costs_no_steps(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 60)
    (tmp_path / "script.py").write_text(NO_RATE)
    words = ["train.checkpoint_interval=100", "optimizer.warmup_iters=0"]
    done = ranks(2, "script.py", *SMALL, *FSDP, *words, under="fork", timeout=100)
    assert done.returncode == 1
    own = r"^schedule=own \(__main__\): own failed at step 3: ZeroDivisionError: .* \(script.py:17\); traceback: "
    rate = r"the hook Rate failed in learning_rate after 2 steps: ValueError: the learning rate is None, not a finite"
    for message, count in ((own, 2), (f"^{rate}", 3)):
        assert len(re.findall(message, done.stdout, re.MULTILINE)) == count, done.stdout
    assert re.search(rf"\[rank 1\] {rate}", done.stderr), done.stderr
    saved = {name: [each.step for each in folders.all_in(tmp_path / f"run-{name}")] for name in ("none", "01", "1")}
    assert saved == {"none": [3], "01": [2], "1": []}


WAITING = """
import sys
import torch
import wordrun
from wordrun import dist
from wordrun.train import failing
from wordrun.train.hooks import Hook

failing.PATIENCE_S, failing.PATIENCE_STEPS = 2.0, 0

class Sum(Hook):
    def after_step(self, trainer):
        if trainer.step == 2:
            if trainer.world.rank == 1:
                raise ValueError("nothing to add")
            torch.distributed.recv(torch.zeros(3), src=1)

with dist.session() as world:
    cfg = dist.broadcast(wordrun.compose(sys.argv[1:]) if world.rank == 0 else None, world)
    wordrun.Trainer(cfg, world, hooks=[Sum()]).train()
"""


def test_ranks_that_wait_in_a_hook_that_has_failed_on_another_do_not_wait_for_ever(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 60)
    (tmp_path / "script.py").write_text(WAITING)
    done = ranks(2, "script.py", *SMALL, *FSDP, "hydra.run.dir=run", under="fork", timeout=100)
    assert done.returncode == 1
    assert "[rank 1] the hook Sum failed in after_step after 2 steps: ValueError: nothing to add" in done.stderr
    assert "(no checkpoint: other ranks do not respond)" in done.stderr


def test_hooks_see_one_model_under_every_layout(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(ranks, 1, {"whole": ["model.batch_size=8"], "deep": ["model.batch_size=8", "model.n_layer=4"]})
    train(ranks, 2, TWO)
    train(ranks, 4, FOUR)
    whole = lines(tmp_path / "whole")
    assert {"ema_val_loss", "grad_norm/blocks.1", "activation_rms/blocks.1", "grad_norm/norm", "spike_score"} <= {
        name for line in whole for name in line
    }
    for name in (*TWO, *FOUR):
        reference = tmp_path / ("deep" if name == "zero-bubble" else "whole")
        whole, mean = lines(reference), averages(reference)
        theirs = averages(tmp_path / name)
        assert theirs.keys() == mean.keys()
        for weight, value in mean.items():
            torch.testing.assert_close(theirs[weight], value, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        found = lines(tmp_path / name)
        assert [line.keys() for line in found] == [line.keys() for line in whole], name
        for ours, expected in zip(found, whole, strict=True):
            for key, value in expected.items():
                rough = 1e-5 if "loss" in key else 2e-2 if key.startswith("spike") else 1e-3
                assert ours[key] == (value and pytest.approx(value, rel=rough)), f"{name}: {key}"
    assert lines(tmp_path / "fsdp-to-fsdp") == lines(tmp_path / "fsdp"), "to the bit on the same layout"
    again = averages(tmp_path / "fsdp-to-fsdp")
    assert all(torch.equal(tensor, again[name]) for name, tensor in averages(tmp_path / "fsdp").items())
    # Sharded like the weights: each rank has written a half.
    stored = index.load(tmp_path / "fsdp/checkpoints/step-00000006")
    for name in mean:
        assert {s.offset for s in stored[f"hooks.ema.{name}"].shards} == {
            s.offset for s in stored[f"model.{name}"].shards
        }
        assert len(stored[f"hooks.ema.{name}"].shards) == 2


SPOILT = """
import sys
import torch
import wordrun
from wordrun import dist
from wordrun.common.errors import UserError
from wordrun.train import failing
from wordrun.train.hooks import Hook

class Spoil(Hook):
    def before_step(self, trainer):
        if trainer.step == at and trainer.world.rank == 1:
            trainer.backend.parts[0].register_forward_hook(lambda module, args, losses: losses * torch.nan)

def fail(self, *args, **options):
    if str(self.world.rank) in culprits:
        raise ValueError("no sample")
    return "text"

failing.TOGETHER_S = 1.0
with dist.session() as world:
    for at, backend in ((0, "DDP"), (2, "FSDP"), (0, "diloco")):
        cfg = wordrun.compose([*sys.argv[1:], f"train.backend={backend}", f"hydra.run.dir=run-{backend}"])
        with wordrun.Trainer(cfg, world, hooks=[Spoil()]) as trainer:
            try:
                trainer.train()
            except UserError as error:
                print(f"{backend} {world.rank}: {error}", flush=True)
        trainer.close()
    wordrun.Trainer.generate = fail
    for culprits in ("01", "1"):
        cfg = wordrun.compose([*sys.argv[1:], "train.sample_tokens=1", f"hydra.run.dir=run-{culprits}"])
        with wordrun.Trainer(cfg, world) as trainer:
            trainer.train()
            print(f"finished {world.rank} without the sample of {culprits}", flush=True)
"""


def test_ranks_agree_on_what_is_not_finite_and_on_samples_that_fail(ranks: Any, tmp_path: Path) -> None:
    """The loss of rank 1 is NaN, that of rank 0 is not. A sample that fails on one rank alone ends the job."""
    (tmp_path / "text.txt").write_text(TEXT * 60)
    (tmp_path / "script.py").write_text(SPOILT)
    words = [*(word for word in SMALL if not word.startswith("hooks")), "model.batch_size=4", "train.max_iters=3"]
    done = ranks(2, "script.py", *words, "train.checkpoint_interval=0", under="fork", timeout=100)
    first = (
        "the loss of step 1 is NaN, before any update of the weights: check losses(batch) of model=nano and the data"
    )
    third = "the loss of step 3 is NaN: lower optimizer.learning_rate, or use train.on_nonfinite=skip or rollback"
    for backend, said in (("DDP", first), ("FSDP", third), ("diloco", first)):
        for rank in (0, 1):
            assert f"{backend} {rank}: {said}" in done.stdout, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"finished {rank} without the sample of 01" in done.stdout
    assert done.stdout.count("the sample at step 3 failed, the run continues without it: ValueError: no sample") == 1
    assert done.returncode == 1
    assert "finished 1 without the sample of 1" not in done.stdout
    assert "ValueError: no sample" in done.stderr
