"""Weights & Biases records the device's load beside the losses, offline too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gpu_runs import SMALL

from wordrun import compose
from wordrun.train.hooks.base import Hook
from wordrun.train.trainer import Trainer

if TYPE_CHECKING:
    import torch


class Slow(Hook):
    """Gives W&B time to look at the device."""

    def after_step(self, trainer: Any) -> None:
        time.sleep(0.3)


def test_the_devices_load_is_recorded(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.5")
    words = [*SMALL, "tracker=wandb", "tracker.wandb.mode=offline", "hydra.run.dir=run"]
    words.remove("tracker=jsonl")
    with Trainer(compose(words), hooks=[Slow()]) as trainer:
        trainer.train()
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    # Names stand in the file as they are.
    assert b"proc.memory.rssMB" in file.read_bytes()
    assert (b"gpu.0." in file.read_bytes()) == (device.type == "cuda")
