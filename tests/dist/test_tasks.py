"""Images: any number of ranks gives the losses of one process, and a resumed run those of an uninterrupted one."""

from __future__ import annotations

import json
import shlex
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SMALL = shlex.split("""
    tracker=jsonl train.dtype=fp32 train.device=cpu train.global_batch_size=16
    train.max_iters=8 train.log_interval=1 train.eval_interval=4 train.eval_iters=2 train.save_best=false
    optimizer.warmup_iters=2 optimizer.learning_rate=1e-2
""")
CONVNET = ["model=convnet", "model.channels=4", "model.hidden=32"]
# Trains without ReLU: some of its inputs are so near 0 that their signs depend on how a processor rounds,
# and one sign changes the norm of the gradients by up to 1e-3.
SMOOTH = """
import sys
import torch
from wordrun.cli import main

class Smooth(torch.nn.GELU):
    def __init__(self, inplace):
        super().__init__()

torch.nn.ReLU = Smooth
raise SystemExit(main(sys.argv[1:]))
"""
KEYS = ("loss", "grad_norm", "val_loss", "val_accuracy")


def figures(
    ranks: Any,
    n: int,
    run_dir: Path,
    *words: str,
    data: Sequence[str] = ("data=digits", *CONVNET),
    program: Sequence[str] = ("-m", "wordrun"),
) -> list[tuple[str, float]]:
    """Train on ``n`` ranks and return all figures in their order."""
    done = ranks(n, *program, *SMALL, *data, f"hydra.run.dir={run_dir}", *words, under="fork", timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert not any("tps" in line or "tokens" in line for line in lines)
    return [(name, line[name]) for line in lines for name in KEYS if name in line]


def same(many: list[tuple[str, float]], one: list[tuple[str, float]]) -> None:
    assert len(one) == 20
    assert [name for name, _ in many] == [name for name, _ in one]
    assert [value for _, value in many] == pytest.approx([value for _, value in one], rel=1e-5)


def test_losses_without_normalization_are_those_of_one_process(ranks: Any, tmp_path: Path) -> None:
    words = ["model.dropout=0", "data.augment=true"]
    one = figures(ranks, 1, tmp_path / "one", *words, "model.batch_size=16")
    assert one[-2][1] < one[0][1], "the model should have learned something to compare"
    for backend, size in (("DDP", 4), ("FSDP", 8)):
        run_dir = tmp_path / backend
        same(figures(ranks, 2, run_dir, *words, f"train.backend={backend}", f"model.batch_size={size}"), one)


def test_batches_are_normalized_over_all_ranks(ranks: Any, tmp_path: Path) -> None:
    words = ["model.dropout=0", "model.norm=sync"]
    one = figures(ranks, 1, tmp_path / "one", *words, "model.batch_size=16")
    for backend in ("DDP", "FSDP"):
        run_dir = tmp_path / backend
        same(figures(ranks, 2, run_dir, *words, f"train.backend={backend}", "model.batch_size=8"), one)


def test_a_resumed_run_is_the_uninterrupted_one(ranks: Any, tmp_path: Path) -> None:
    words = ["model.norm=batch", "data.augment=true", "model.batch_size=8", "train.checkpoint_interval=4"]
    whole = figures(ranks, 2, tmp_path / "whole", *words)
    again = figures(ranks, 2, tmp_path / "again", *words, f"train.resume={tmp_path}/whole/checkpoints/step-00000004")
    assert again == whole
    other = figures(ranks, 1, tmp_path / "other", *words, f"train.resume={tmp_path}/whole/checkpoints/step-00000004")
    assert other[:10] == whole[:10]  # the same weights and statistics until there
    assert other[-2][1] < whole[8][1]


@pytest.mark.usefixtures("torchvision")
def test_mnist_is_read_from_its_own_files(ranks: Any, tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "mnist" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for split, count in (("train", 64), ("t10k", 16)):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * label : 2 * label + 2] = 255  # a bar whose place is the class
        (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, count, 28, 28) + images.tobytes())
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels.tobytes())
    words = ["model.batch_size=8", "train.max_iters=24", "train.eval_interval=24"]
    data = ["data=mnist", f"data.path={tmp_path}/mnist", *CONVNET]
    found = figures(ranks, 2, tmp_path / "run", *words, data=data)
    assert found[-1][0] == "val_accuracy"
    assert found[-1][1] > 0.9


@pytest.mark.usefixtures("torchvision")
def test_a_residual_network_learns_from_a_folder_of_images(ranks: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name, color in (("cat", (200, 60, 60)), ("dog", (60, 60, 200))):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(24):
            pixels = np.clip(rng.normal(color, 40, (20, 30, 3)), 0, 255).astype(np.uint8)
            image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    data = ["data=imagefolder", "data.path=pets", "data.size=16", "model=resnet18", "model.norm=sync"]
    data += ["train.checkpoint_interval=0"]  # 130 MB
    Path("smooth.py").write_text(SMOOTH)
    one = figures(ranks, 1, tmp_path / "one", "model.batch_size=16", data=data, program=["smooth.py"])
    two = figures(ranks, 2, tmp_path / "two", "model.batch_size=8", data=data, program=["smooth.py"])
    assert [value for _, value in two[:2]] == pytest.approx([value for _, value in one[:2]], rel=1e-5)
    for run in (one, two):
        losses = [value for name, value in run if name == "loss"]
        assert losses[-1] < 0.2 * losses[0]


@pytest.mark.usefixtures("torchvision")
def test_a_residual_network_is_sharded_block_by_block(ranks: Any, tmp_path: Path) -> None:
    script = Path("resnet.py")
    script.write_text(
        """
import torch, wordrun
from torch.distributed.fsdp import FSDPModule
cfg = wordrun.compose([
    "data=fake_images", "data.size=16", "data.examples=64", "model=resnet18", "model.batch_size=4", "model.norm=sync",
    "train.max_iters=2", "train.backend=FSDP", "train.dtype=fp32", "train.device=cpu", "tracker=jsonl",
    "train.eval_iters=1", "train.checkpoint_interval=0", "hydra.run.dir=run",
])
with wordrun.Trainer(cfg) as trainer:
    model = trainer.backend.parts[0]
    assert sum(isinstance(block, FSDPModule) for block in model.blocks.values()) == 8
    trainer.train()
    means = [b.clone() for name, b in model.named_buffers() if name.endswith("running_mean")]
    for mean in means:
        copies = [torch.empty_like(mean) for _ in range(2)]
        torch.distributed.all_gather(copies, mean)
        assert torch.equal(*copies) and mean.any()
"""
    )
    done = ranks(2, script, under="fork", timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def test_deepspeed_trains_and_resumes_a_network_with_batch_norm(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    words = ["model.dropout=0", "model.norm=sync", "train.checkpoint_interval=4", "train.backend=deepspeed"]
    one = figures(ranks, 1, tmp_path / "one", *words[:2], "model.batch_size=16")
    whole = figures(ranks, 2, tmp_path / "whole", *words, "model.batch_size=8")
    same(whole, one)
    start = f"train.resume={tmp_path}/whole/checkpoints/step-00000004"
    assert figures(ranks, 2, tmp_path / "again", *words, "model.batch_size=8", start) == whole
    for norm in ("batch", "sync"):
        words[1:2] = [f"model.norm={norm}"]
        alone = [*words, "model.batch_size=16", "train.dtype=bf16", "train.max_iters=1"]
        half = figures(ranks, 1, tmp_path / norm, *alone)
        assert half[0][1] == pytest.approx(one[0][1], rel=0.02)
