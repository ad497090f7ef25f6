"""Profilers on the device: kernels in the summary, and a snapshot of the allocator's memory."""

from __future__ import annotations

import gzip
import json
import pickle
from typing import TYPE_CHECKING

import pytest
from gpu_runs import Train

if TYPE_CHECKING:
    import torch


def test_the_trace_and_its_summary_have_the_devices_kernels(train: Train, device: torch.device) -> None:
    folder = train("run", "profiler=torch", "profiler.wait=2", "profiler.active=2", "train.max_iters=8").folder
    with gzip.open(folder / "profile/traces/rank-0.pt.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events) == (device.type == "cuda")
    summary = (folder / "profile/summary.txt").read_text()
    assert "aten::mm" in summary
    assert ("Self CUDA" in summary) == (device.type == "cuda")


@pytest.mark.usefixtures("only_on_device")
def test_a_snapshot_of_the_memory(train: Train, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("torch takes snapshots of CUDA's memory only")
    run = train("run", "profiler=memory", "profiler.wait=2", "profiler.active=2", "train.max_iters=8")
    with (run.folder / "profile" / "memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"]
    assert any(snapshot["device_traces"])
