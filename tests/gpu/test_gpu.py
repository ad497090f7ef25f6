"""On an accelerator: parity, precision, compilation, figures. Run by hand where there is one: bin/test tests/gpu."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SMALL = [
    "data=sample", "tracker=jsonl", "train.max_iters=20", "train.log_interval=1", "train.eval_iters=2",
    "train.sample_tokens=16", "optimizer.warmup_iters=2", "model.n_layer=2", "model.n_head=2", "model.n_embd=64",
]  # fmt: skip


def train(run_dir: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train as one process and return the training lines and run.json."""
    words = [sys.executable, "-m", "wordrun", *SMALL, *overrides, f"hydra.run.dir={run_dir}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], json.loads((run_dir / "run.json").read_text())


def test_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    on_device, record = train(tmp_path / "device", "train.dtype=fp32")
    on_cpu, _ = train(tmp_path / "cpu", "train.dtype=fp32", "train.device=cpu")
    assert record["world"]["device"] != "cpu"
    assert [m["loss"] for m in on_device] == pytest.approx([m["loss"] for m in on_cpu], rel=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_learns_as_single_does(dtype: str, tmp_path: Path) -> None:
    half, record = train(tmp_path / dtype, f"train.dtype={dtype}")
    single, _ = train(tmp_path / "fp32", "train.dtype=fp32")
    assert record["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert half[-1]["loss"] == pytest.approx(single[-1]["loss"], rel=0.03)


@pytest.mark.parametrize("model", [[], ["model=llama_debug"]], ids=["gpt", "llama"])
@pytest.mark.parametrize("more", [[], ["train.activation_checkpointing=selective"]], ids=["all kept", "selective"])
def test_compiled_model_gives_the_same_losses(model: list[str], more: list[str], tmp_path: Path) -> None:
    compiled, _ = train(tmp_path / "compiled", "train.dtype=fp32", "train.compile=true", *model, *more)
    eager, _ = train(tmp_path / "eager", "train.dtype=fp32", *model)
    assert [m["loss"] for m in compiled] == pytest.approx([m["loss"] for m in eager], rel=1e-3)


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("backend", ["DDP", "FSDP", "TP", "PP"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_devices_go_as_one(backend: str, dtype: str, tmp_path: Path) -> None:
    one, _ = train(tmp_path / "one", f"train.dtype={dtype}", "train.global_batch_size=8", "model.batch_size=4")
    words = [*SMALL, f"train.dtype={dtype}", f"train.backend={backend}", "train.global_batch_size=8",
             "model.batch_size=4", f"hydra.run.dir={tmp_path / 'two'}"]  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "wordrun"]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    near = 1e-3 if dtype == "fp32" else 0.03
    assert [m["loss"] for m in lines if "loss" in m] == pytest.approx([m["loss"] for m in one], rel=near)


def test_times_are_the_devices(tmp_path: Path) -> None:
    lines, _ = train(tmp_path / "run", "model.n_embd=256", "model.batch_size=32")
    for m in lines[5:]:
        assert 0 < m["dtf"] < m["dt"]
        assert 0 < m["dtb"] < m["dt"]
        assert m["mfu"] is None or 0 < m["mfu"] < 100


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_goes_on_as_if_it_had_not_stopped(dtype: str, tmp_path: Path) -> None:
    """Dropout's streams are the device's; in fp16 the scale of the loss goes on, too."""
    words = (f"train.dtype={dtype}", "model.dropout=0.1", "train.checkpoint_interval=10", "train.keep_checkpoints=9")
    whole, _ = train(tmp_path / "whole", *words)
    checkpoint = tmp_path / "whole/checkpoints/step-00000010"
    on, record = train(tmp_path / "on", *words, f"train.resume={checkpoint}")
    assert record["resumed_from"]["step"] == 10
    assert [m["loss"] for m in on] == pytest.approx([m["loss"] for m in whole], rel=1e-5 if dtype == "fp32" else 1e-3)


def test_memory_that_runs_out_is_explained(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "wordrun", *SMALL, "model.batch_size=2000000", f"hydra.run.dir={tmp_path / 'run'}"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=170)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "not enough memory: this run needs about" in refused.stderr
    assert "The largest model.batch_size that fits is" in refused.stderr
    done = subprocess.run([*words, "train.check_memory=false"], capture_output=True, text=True, timeout=170)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("out of memory on ")
    assert "torch's allocator used" in lines[1]
    assert "Traceback" not in done.stderr
