"""Profilers on the device: kernels in the summary, and a snapshot of the allocator's memory."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from gpu_runs import Train

if TYPE_CHECKING:
    import torch


def test_the_summary_is_of_the_devices_kernels(train: Train, device: torch.device) -> None:
    from wordrun.report import trace

    run = train("run", "profiler=torch", "profiler.wait=2", "profiler.active=2", "train.max_iters=8")
    summary = trace.load(run.folder / "profile" / "summary.json")
    assert summary is not None
    assert (summary.where, summary.steps) == ("CPU" if device.type == "cpu" else "device", 2)
    assert 0 < summary.compute <= summary.seconds
    assert len(summary.operations) == 10


@pytest.mark.usefixtures("only_on_device")
def test_a_snapshot_of_the_memory(train: Train, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("torch takes snapshots of CUDA's memory only")
    run = train("run", "profiler=memory", "profiler.wait=2", "profiler.active=2", "train.max_iters=8")
    with (run.folder / "profile" / "memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"]
    assert any(snapshot["device_traces"])
