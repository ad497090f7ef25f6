"""Activations in host memory: the same losses, and less of the device's memory."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest
from gpu_runs import Train

if TYPE_CHECKING:
    import torch

SHAPES = shlex.split("""
    model=nano
    model.n_layer=6 model.n_embd=256 model.n_head=4 model.block_size=512 model.batch_size=16
    train.max_iters=4 train.eval_interval=0
""")


@pytest.mark.usefixtures("one_rank_shards", "only_on_device")
@pytest.mark.parametrize("backend", ["DDP", "FSDP"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offloaded_activations_leave_the_device(train: Train, device: torch.device, backend: str, dtype: str) -> None:
    import torch

    torch.zeros(1, device=device)  # starts CUDA, without which there are no statistics to reset
    peaks, losses = [], []
    for name, words in (("kept", []), ("offloaded", ["train.activation_offload=true"])):
        module = torch.get_device_module(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        run = train(name, *SHAPES, f"train.backend={backend}", f"train.dtype={dtype}", *words)
        peaks.append(module.max_memory_allocated(device) - before)
        losses.append(run.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "fp32" else 1e-3)
    assert peaks[1] < 0.7 * peaks[0]
