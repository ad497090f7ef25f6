"""Compiled blocks beside eager ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from gpu_runs import Train

if TYPE_CHECKING:
    import torch


MODELS = {"gpt": [], "llama": ["model=llama_debug", "model.n_layer=2", "model.n_head=4", "model.n_kv_head=2"]}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_compiled_blocks_give_the_same_losses(train: Train, device: torch.device, model: list[str]) -> None:
    words = ["train.dtype=bf16", "model.n_embd=128", *model]
    eager, compiled = train("eager", *words), train("compiled", *words, "train.compile=true")
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2)
    if device.type == "cuda":
        assert compiled.record["dtype"] == "bfloat16"


def test_a_model_compiled_as_a_whole(train: Train) -> None:
    eager = train("eager", "train.dtype=bf16", "train.eval_interval=10")
    words = ["train.dtype=bf16", "train.eval_interval=10", "train.compile=true", "train.compile_scope=model"]
    compiled = train("compiled", *words, "train.sample_tokens=8")
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2)
    assert compiled.record["val_loss"] == pytest.approx(eager.record["val_loss"], rel=1e-2)


def test_compiled_in_single_precision_with_selective_checkpointing(train: Train) -> None:
    eager = train("eager", "train.dtype=fp32")
    words = ["train.dtype=fp32", "train.compile=true", "train.activation_checkpointing=selective"]
    assert train("compiled", *words).losses == pytest.approx(eager.losses, rel=1e-4)


@pytest.mark.usefixtures("one_rank_shards")
def test_compiled_blocks_under_fsdp(train: Train) -> None:
    eager = train("eager", "train.dtype=bf16", "train.backend=FSDP")
    words = ["train.dtype=bf16", "train.backend=FSDP", "train.compile=true", "train.activation_checkpointing=full"]
    assert train("compiled", *words).losses == pytest.approx(eager.losses, rel=1e-2)
