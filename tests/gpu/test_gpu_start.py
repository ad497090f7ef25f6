"""Starting: the group and its device, ``launch``, ``--doctor``, and memory that runs out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from gpu_runs import SMALL, ran

if TYPE_CHECKING:
    from conftest import Command

ORDER = """
import json, torch, torch.distributed as td
from wordrun import dist
calls = []

def watched(module, name):
    real = getattr(module, name)
    def call(*args, **options):
        calls.append([name, str(args[0]), str(options.get("device_id"))])
        return real(*args, **options)
    setattr(module, name, call)

watched(torch.accelerator, "set_device_index")
watched(td, "init_process_group")
world = dist.setup()
ones = torch.ones(3, device=world.device)
td.all_reduce(ones)
group = td.distributed_c10d._get_default_group()
found = {"calls": calls, "backend": td.get_backend(), "bound": str(group.bound_device_id), "device": world.device}
print(json.dumps({**found, "current": torch.accelerator.current_device_index(), "sum": ones.sum().item()}))
dist.cleanup()
assert not td.is_initialized()
"""


@pytest.mark.usefixtures("only_on_device")
def test_the_group_is_bound_to_the_device_that_was_set_before(command: Command, device: torch.device) -> None:
    done = command(sys.executable, "-c", ORDER)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    backend = {"cuda": "nccl", "xpu": "xccl"}[device.type]
    assert found["calls"] == [["set_device_index", "0", "None"], ["init_process_group", backend, str(device)]]
    assert found["backend"] == backend
    assert found["bound"] == found["device"] == str(device)
    assert found["current"] == 0
    assert found["sum"] == 3
    assert "Warning" not in done.stderr, done.stderr


def test_launch_starts_a_rank_for_each_device(command: Command, device: torch.device, tmp_path: Path) -> None:
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    ranks = ["-n", "1"] if device.type == "cpu" else []
    words = [sys.executable, "-m", "wordrun", *SMALL, "hydra.run.dir=run"]
    done = command(sys.executable, "-m", "wordrun.launch", *ranks, *words, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    run = ran(tmp_path / "run")
    assert run.record["world"]["size"] == count
    assert run.record["world"]["device"] == str(device)
    assert run.record["exit_reason"] == "finished"
    assert json.loads((tmp_path / "run/launch.json").read_text())["exit_status"] == 0


def test_doctor_finds_nothing_wrong(command: Command, device: torch.device) -> None:
    ranks = ["-n", "1"] if device.type == "cpu" else []
    done = command(sys.executable, "-m", "wordrun.launch", "--doctor", *ranks, "--json", timeout=150)
    findings = {each["check"]: each for each in json.loads(done.stdout)}
    assert not [each for each in findings.values() if each["state"] == "wrong"], done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    if device.type != "cpu":
        assert findings["devices"]["found"] == f"torch sees {torch.accelerator.device_count()} on each rank"


@pytest.mark.usefixtures("only_on_device")
def test_memory_that_runs_out_is_explained(wordrun_words: Callable[..., list[str]]) -> None:
    """The first activation alone is larger than the device, so that tests beside this one keep their memory."""
    wide = [
        "model.n_layer=1",
        "model.n_head=16",
        "model.n_embd=2048",
        "model.block_size=1024",
        "model.batch_size=25000",
    ]
    wide += ["train.dtype=fp32", "train.eval_iters=1", "data.prefetch=0"]
    refused = subprocess.run(wordrun_words("run", *wide), capture_output=True, text=True, timeout=170)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "not enough memory: this run needs about" in refused.stderr
    assert "The largest model.batch_size that fits is" in refused.stderr
    words = wordrun_words("run", *wide, "train.check_memory=false")
    done = subprocess.run(words, capture_output=True, text=True, timeout=170)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("out of memory on "))
    assert "torch's allocator used" in lines[start + 1]
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("backend", ["DDP", "FSDP", "TP", "PP"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_devices_go_as_one(
    command: Command, wordrun_words: Callable[..., list[str]], backend: str, dtype: str, tmp_path: Path
) -> None:
    words = [f"train.dtype={dtype}", "train.global_batch_size=8", "model.batch_size=4"]
    assert command(*wordrun_words("one", *words), timeout=170).returncode == 0
    two = wordrun_words("two", *words, f"train.backend={backend}")[1:]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command(*launch, *two, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    near = 1e-3 if dtype == "fp32" else 0.03
    assert ran(tmp_path / "two").losses == pytest.approx(ran(tmp_path / "one").losses, rel=near)
