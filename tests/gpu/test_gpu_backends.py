"""Every backend on one device, DDP with two ranks on it, and a step that never waits for the device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gpu_runs import SMALL, Train, ran

if TYPE_CHECKING:
    import torch

    from conftest import Command


BACKENDS = {
    "DDP": ["train.backend=DDP", "backend.compress=bf16"],
    "FSDP": ["train.backend=FSDP"],
    "ZeRO-2": ["train.backend=FSDP", "backend.reshard_after_forward=false"],
    "TP": ["train.backend=TP", "backend.tp=1"],
    "PP": ["train.backend=PP", "backend.pp=1"],
    "interleaved": ["train.backend=PP", "backend.pp=1", "backend.schedule=Interleaved1F1B"],
    "zero bubble": ["train.backend=PP", "backend.pp=1", "backend.schedule=InterleavedZeroBubble"],
    "ZBV": ["train.backend=PP", "backend.pp=1", "backend.schedule=ZBVZeroBubble"],
    "3D": ["train.backend=3D", "backend.pp=1", "backend.tp=1"],
}


@pytest.mark.usefixtures("one_rank_shards")
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_each_backend_gives_the_same_losses(train: Train, device: torch.device, backend: list[str]) -> None:
    """Evaluation, samples, accumulation and clipping included."""
    words = ["train.global_batch_size=24", "train.sample_tokens=8", "train.eval_interval=10", "optimizer.grad_clip=0.5"]
    alone = train("alone", "train.dtype=fp32", *words)
    single = train("fp32", "train.dtype=fp32", *words, *backend)
    assert single.losses == pytest.approx(alone.losses, rel=1e-4)
    assert single.record["val_loss"] == pytest.approx(alone.record["val_loss"], rel=1e-4)
    half = train("bf16", "train.dtype=bf16", *words, *backend)
    assert half.losses == pytest.approx(alone.losses, rel=0.03)
    if device.type == "cuda":
        assert half.record["dtype"] == "bfloat16"


@pytest.mark.usefixtures("one_rank_shards", "only_on_device")
def test_offloaded_shards_train_alike(train: Train) -> None:
    words = ["train.backend=FSDP", "train.dtype=fp32"]
    kept = train("kept", *words)
    offloaded = train("offloaded", *words, "backend.cpu_offload=true", "train.checkpoint_interval=10")
    assert offloaded.losses == pytest.approx(kept.losses, rel=1e-4)


TWO_RANKS = """
import sys
import torch
import torch.distributed
torch.distributed.init_process_group("gloo")  # NCCL refuses two ranks on one device
import wordrun
with wordrun.Trainer(wordrun.compose([*sys.argv[1:], "train.report=false"])) as trainer:
    trainer.train()
    devices = {p.device for p in trainer.backend.parameters}
    assert len(devices) == 1, devices
    print("device", *devices)
"""


def test_two_ranks_share_the_device(train: Train, device: torch.device, command: Command, tmp_path: Path) -> None:
    """DDP over gloo, which sums tensors of the device, too; checkpoints and evaluation included."""
    words = ["train.dtype=fp32", "train.global_batch_size=24", "train.checkpoint_interval=10", "train.eval_interval=10"]
    alone = train("alone", *words)
    (tmp_path / "two.py").write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command(*torchrun, "two.py", *SMALL, *words, "hydra.run.dir=two", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"device {device}\n") == 2, done.stdout
    two = ran(tmp_path / "two")
    assert two.record["world"]["size"] == 2
    assert two.losses == pytest.approx(alone.losses, rel=1e-4)
    assert json.loads((tmp_path / "two/checkpoints/step-00000020/manifest.json").read_text())["step"] == 20


@pytest.mark.usefixtures("one_rank_shards", "only_on_device")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("DDP", "bf16"), ("DDP", "fp16"), ("FSDP", "bf16")],
    ids=["DDP-bf16", "DDP-fp16", "FSDP-bf16"],
)
def test_a_step_does_not_wait_for_the_device(backend: str, dtype: str) -> None:
    """Between logged steps the host runs ahead, so that the device always has work."""
    import torch

    from wordrun import compose
    from wordrun.train.trainer import Trainer

    words = [
        *SMALL,
        f"train.dtype={dtype}",
        f"train.backend={backend}",
        "train.log_interval=1000",
        "train.max_iters=100",
    ]
    with Trainer(compose([*words, "optimizer.gas=2", "hydra.run.dir=run"])) as trainer:
        for number in range(6):
            torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
            try:
                trainer.result = trainer._train_step(1e-3)
                trainer.state.take(trainer.examples_per_step)
                assert number == 0 or trainer.hooks.accepts_step(trainer)
                trainer.state.count_step()
                trainer.meter.add(trainer.result, 1e-3, trainer.examples_per_step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        line = trainer.meter.line(trainer.state)
    assert 0 < line["dtf"] < line["dt"]
    assert 0 < line["dtb"] < line["dt"]


def test_times_are_the_devices(train: Train, device: torch.device) -> None:
    lines = train("run", "model.n_embd=256", "model.batch_size=32").lines
    for line in lines[5:]:
        assert 0 < line["dtf"] < line["dt"]
        assert 0 < line["dtb"] < line["dt"]
        assert line["mfu"] is None or 0 < line["mfu"] < 100
    if device.type == "cuda":
        import torch

        from wordrun.plan import devices

        known = devices.find(torch.cuda.get_device_name(device)) is not None
        assert (lines[-1]["mfu"] is not None) == known
