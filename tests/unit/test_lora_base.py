"""The base model of LoRA: a checkpoint of its own, which is recognized by all of its weights."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import wordrun
from wordrun import Trainer
from wordrun.checkpoint.load import find
from wordrun.common.errors import ConfigError, UserError
from wordrun.model import lora

Words = Callable[..., list[str]]
MODERN = tuple(
    shlex.split("""
    model=modern optimizer=adamw schedule=cosine model.norm_weights=false model.n_hidden=24
    train.checkpoint_interval=1 train.keep_checkpoints=9
    train.eval_interval=0 train.sample_tokens=0 train.save_best=false
""")
)


def test_adapters_stay_with_the_checkpoint_that_they_began_with(
    small: Words, tmp_path: Path, seal: Callable[..., None]
) -> None:
    """Also if the run of the base model trains on, with a model that has neither norms nor biases."""
    base, run = tmp_path / "base", tmp_path / "run"
    own = ["model.lora_rank=2", f"hydra.run.dir={run}"]

    def train(*words: str) -> Trainer:
        with Trainer(wordrun.compose(small(*MODERN, *words))) as trainer:
            trainer.train()
        return trainer

    def frozen(trainer: Trainer) -> torch.Tensor:
        weights = dict(trainer.backend.parts[0].named_parameters())
        return weights["blocks.0.mlp.up.weight"].detach()

    train(f"hydra.run.dir={base}", "train.max_iters=1")
    first = frozen(train(*own, f"train.init_from={base}", "train.max_iters=1"))
    assert find(run).manifest["base"]["source"] == str(base / "checkpoints/step-00000001")
    merged = find(run).weights()["blocks.0.mlp.up.weight"]
    train(f"hydra.run.dir={base}", "train.max_iters=2", "train.resume=auto")
    assert find(run).weights()["blocks.0.mlp.up.weight"].equal(merged)
    again = [*own, "train.max_iters=2", "train.resume=auto"]
    assert frozen(train(*again, f"train.init_from={base}")).equal(first)
    newer = f"train.init_from={base}/checkpoints/step-00000002"
    with pytest.raises(
        ConfigError, match=r"step-00000002 has other weights than .*/step-00000001 had when the adapters"
    ):
        train(*again, newer)
    # A checkpoint of an earlier version, whose checksum says nothing about such a model.
    old, then = find(run), {"source": str(base), "digest": xxhash.xxh3_64().hexdigest()}
    facts: dict[str, Any] = {name: value for name, value in old.manifest["facts"].items() if "base" not in name}
    seal(old.folder, base=then, facts={**facts, "the base model (train.init_from)": then["digest"]})
    train(*again[:-2], "train.max_iters=3", "train.resume=auto", newer)
    assert find(run).manifest["base"]["digest"].startswith(lora.DIGEST)
    shutil.rmtree(base / "checkpoints/step-00000002")
    gone = rf"only LoRA's adapters of {re.escape(str(base))}/checkpoints/step-00000002: put the original model back"
    with pytest.raises(UserError, match=gone):
        find(run).weights()


def test_every_tensor_of_a_base_model_counts() -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    usual = lora.digest(weights, model)
    assert usual == lora.digest({name: tensor.double() for name, tensor in weights.items()}, model)
    norms = lora.digest_like("older", weights, model)
    for name, tensor in weights.items():
        changed = {**weights, name: tensor + 1}
        assert lora.digest(changed, model) == lora.digest_like(usual, changed, model) != usual
        assert (lora.digest_like("older", changed, model) == norms) is (tensor.dim() > 1)


def test_of_a_large_tensor_some_rows_count() -> None:
    """Of 50 rows of 26,215 values, 10: the first that have 2^18 values."""
    model = nn.Embedding(50, 26_215)
    weights = {"weight": model.weight.detach()}
    some = lora.digest(weights, model)
    for row in range(50):
        changed = {"weight": weights["weight"].index_fill(0, torch.tensor(row), 9)}
        assert (lora.digest(changed, model) == some) is bool(row % 5)
