"""An accelerator's losses beside a CPU's, in each precision, and the same ones twice."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from gpu_runs import SMALL, Train

if TYPE_CHECKING:
    import torch

    from conftest import Command


MODELS = {
    "gpt": ["model.bias=true"],
    "llama": ["model=llama_debug", "model.n_layer=2", "model.n_head=4", "model.n_kv_head=2", "model.n_embd=64"],
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_single_precision_equals_the_cpu(train: Train, device: torch.device, model: list[str]) -> None:
    """Dropout is off: its random numbers are the device's."""
    import torch

    assert not torch.backends.cuda.matmul.allow_tf32
    on_device = train("device", "train.dtype=fp32", *model)
    on_cpu = train("cpu", "train.dtype=fp32", "train.device=cpu", *model)
    assert on_device.record["world"]["device"] == str(device)
    assert len(on_device.losses) == 20
    assert on_device.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    assert on_device.losses[-1] < 0.9 * on_device.losses[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_learns_as_single_does(train: Train, device: torch.device, dtype: str) -> None:
    half, single = train(dtype, f"train.dtype={dtype}"), train("fp32", "train.dtype=fp32")
    if device.type != "cpu":
        assert half.record["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert half.losses == pytest.approx(single.losses, rel=0.03)


def test_fp16_recovers_from_an_overflow(train: Train, only_on_device: None) -> None:
    """The scaler halves a scale that is too large, skips those steps, and the run learns in the others."""
    from wordrun import compose
    from wordrun.train.trainer import Trainer

    with Trainer(compose([*SMALL, "train.dtype=fp16", "hydra.run.dir=run"])) as trainer:
        trainer.backend.scaler._init_scale = 2.0**24  # type: ignore[attr-defined]  # before its first use
        before = trainer.evaluate()
        trainer.train()
        assert trainer.backend.scaler.get_scale() < 2.0**24  # type: ignore[attr-defined]
        assert trainer.evaluate() < 0.95 * before


@pytest.mark.usefixtures("one_rank_shards")
@pytest.mark.parametrize("backend", ["DDP", "FSDP"])
@pytest.mark.parametrize(
    "words", [["train.dtype=fp32"], ["train.dtype=bf16"], ["train.dtype=bf16", "train.compile=true"]]
)
def test_the_loss_over_a_large_vocabulary(train: Train, device: torch.device, backend: str, words: list[str]) -> None:
    """Its own kernel, which keeps one copy of the logits, gives the same losses as torch's cross entropy."""
    many = [f"train.backend={backend}", "model.vocab_size=22016"]
    many += ["train.max_iters=4"] if device.type == "cpu" else []
    own, other = (train(each, *words, *many, f"train.chunked_loss={each}") for each in ("true", "false"))
    assert own.losses == pytest.approx(other.losses, rel=1e-4 if "fp32" in words[0] else 1e-2)


DETERMINISTIC = """
import json, sys
import torch
from wordrun import compose
from wordrun.train.trainer import Trainer

found = []
for number in range(2):
    with Trainer(compose([*sys.argv[1:], "train.report=false", f"hydra.run.dir=run-{number}"])) as trainer:
        trainer.train()
        weights = [p.detach().cpu() for p in trainer.backend.parameters]
    lines = [json.loads(line) for line in open(f"run-{number}/metrics.jsonl")]
    found.append(([line["loss"] for line in lines if "loss" in line], weights))
(losses, weights), (again, same) = found
assert losses == again, (losses, again)
assert all(a.equal(b) for a, b in zip(weights, same))
assert len(losses) == 20
assert not torch.are_deterministic_algorithms_enabled()
print("equal")
"""


@pytest.mark.parametrize("words", [["train.dtype=fp32"], ["train.dtype=bf16", *MODELS["llama"]]], ids=["gpt", "llama"])
def test_deterministic_runs_are_equal_to_the_bit(
    command: Command, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, where the option itself prepares cuBLAS before CUDA starts."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    more = ["train.deterministic=true", "model.dropout=0.1", "model.n_embd=256", "model.batch_size=16"]
    more += ["model.vocab_size=20096"]  # so large that the loss has its own kernel
    done = command(sys.executable, "-c", DETERMINISTIC, *SMALL, *words, *more, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("equal\n")
