"""Which device a rank uses where torch sees none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from wordrun.common.errors import WorldError
from wordrun.common.version import torch_build
from wordrun.dist.device import choose_device
from wordrun.dist.world import World

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="torch sees a device")
HERE = World(hosts=("n1",))


def test_ranks_do_not_run_on_cpus_unnoticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not where launch has counted devices, unless the CPU is chosen, or the user hides the devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_device("auto", HERE).type == "cpu", "launch has counted none"
    monkeypatch.setenv("WORDRUN_DEVICES", "4 (site juwels_booster)")
    with pytest.raises(
        WorldError,
        match=r"launch counted devices: 4 \(site juwels_booster\), but torch .* finds none on n1: .*device=cpu",
    ):
        choose_device("auto", HERE)
    assert choose_device("cpu", HERE).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(WorldError):
        choose_device("auto", HERE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto", HERE).type == "cpu"
    assert "CUDA_VISIBLE_DEVICES= hides the devices of n1 (launch counted 4 (site juwels_booster))" in caplog.text


def test_torchs_build_and_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, None, raising=False)
    assert torch_build(str(tmp_path)) == "torch 2.8.0+cpu (built for CPUs alone)"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 13.2\n"
    )
    assert torch_build(str(tmp_path)) == "torch 2.8.0+cpu (built for CUDA 13.0, NVIDIA driver 535.183.01)"
