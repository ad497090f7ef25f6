"""Mixtures of experts give the losses of one process on every layout, and runs resume with another one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import together

pytestmark = pytest.mark.timeout(300)

SMALL = shlex.split("""
    model=moe_debug data=text tokenizer=byte data.path=documents.jsonl tracker=jsonl train.dtype=fp32
    train.device=cpu train.max_iters=4 train.log_interval=1 train.eval_interval=2 train.eval_iters=1
    train.sample_tokens=2 train.sample_prompt=The train.global_batch_size=4 train.save_best=false
    optimizer.warmup_iters=2 optimizer.learning_rate=2e-3 optimizer.lr_decay_iters=4 model.n_layer=2
    model.n_head=4 model.n_kv_head=2 model.n_embd=32 model.block_size=32 model.n_experts=4
    model.n_hidden=24 model.balance_rate=0.01 optimizer.grad_clip=0.3
""")
MODELS = {
    "loss": ["model.n_shared=1", "model.balance_loss=0.05"],
    "bias": shlex.split("""
        model.n_shared=0 model.router=sigmoid model.n_active=3 data.mask_documents=true optimizer=muon
    """),
}
FSDP, HALF = "train.backend=FSDP", ["train.max_iters=2", "train.checkpoint_interval=2"]
ONE = {f"{name}-one": ["model.batch_size=4"] for name in MODELS}
TWO = {
    "loss-ddp": ["model.batch_size=1", "train.activation_checkpointing=selective"],
    "loss-ep": [FSDP, "backend.ep=2", "model.batch_size=1"],
    "loss-compiled": [FSDP, "backend.ep=2", "model.batch_size=2", "train.compile=true", "hooks=[ema]"],
    "loss-half": [FSDP, "backend.ep=2", "model.batch_size=2", *HALF],
}
FOUR = {
    "loss-ep4": [FSDP, "backend.ep=4", "model.batch_size=1", "train.activation_checkpointing=full"],
    "loss-shards": [FSDP, "backend.ep=2", "model.batch_size=1", "train.activation_checkpointing=selective"],
    "loss-replicas": [FSDP, "backend.ep=2", "backend.replicate=2", "model.batch_size=1"],
    "bias-cp": [FSDP, "backend.ep=2", "backend.cp=2", "model.batch_size=2", "backend.reshard_after_forward=false"],
    "bias-pp": ["train.backend=PP", "backend.pp=2", "backend.shard=2", "backend.ep=2", "model.batch_size=2"],
    "loss-cp": [FSDP, "backend.ep=2", "backend.cp=2", "model.batch_size=2", "train.activation_checkpointing=full"],
    "loss-pp": ["train.backend=PP", "backend.pp=2", "backend.cp=2", "backend.ep=2", "model.batch_size=2"],
    "bias-half": [FSDP, "backend.ep=4", "model.batch_size=1", *HALF],
    "loss-resumed": [FSDP, "model.batch_size=1", "train.resume=loss-half"],
    "bias-resumed": [FSDP, "backend.ep=2", "model.batch_size=1", "train.resume=bias-half"],
}
AOT = """
whole = torch.compile  # as far as g++, which takes minutes
torch.compile = lambda call, **options: whole(call, **{**options, "backend": "aot_eager"})
"""


def train(ranks: Any, n: int, runs: dict[str, list[str]]) -> None:
    models = {name: MODELS[name.partition("-")[0]] for name in runs}
    together.train(ranks, n, {name: [*SMALL, *models[name], *words] for name, words in runs.items()}, AOT)


def figures(name: str, first: int = 0) -> dict[str, list[Any]]:
    """Return what the run ``name`` reported after step ``first``."""
    lines = [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "grad_norm", "val_loss", "expert_load_max", "expert_load")
    return {key: [line[key] for line in lines if key in line and line["step"] > first] for key in keys}


def compare(name: str) -> None:
    """Fail unless the run ``name`` went as one process did."""
    reference, first = f"{name.partition('-')[0]}-one", 2 if name.endswith("resumed") else 0
    ours, theirs = figures(name, first), figures(reference, first)
    assert len(ours["loss"]) == 4 - first
    for key, tolerance in (("loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-3)):
        assert ours[key] == pytest.approx(theirs[key], rel=tolerance), f"{name}: {key}"
    # Rounding may send a token elsewhere if two experts have the same score: that is 1/64 or 1/96 of a load.
    assert ours["expert_load_max"] == pytest.approx(theirs["expert_load_max"], abs=0.04)
    for load, expected in zip(ours["expert_load"], theirs["expert_load"], strict=True):
        for block, other in zip(load, expected, strict=True):
            assert block == pytest.approx(other, abs=0.04)
    last, their_last = ((Path(run) / "samples.txt").read_text().rpartition("---")[2] for run in (name, reference))
    assert last == their_last


def test_experts_anywhere_learn_as_in_one_process(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(ranks, 1, ONE)
    whole = figures("loss-one")
    assert whole["loss"][0] > whole["loss"][-1]
    assert len({tuple(block) for loads in whole["expert_load"] for block in loads}) > 4  # the loads change
    train(ranks, 2, TWO)
    train(ranks, 4, FOUR)
    for name in {**TWO, **FOUR}:
        if not name.endswith("half"):
            compare(name)
