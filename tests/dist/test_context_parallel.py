"""Sequences divided among ranks give the losses and the samples of one process, and can be resumed undivided."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import together
from wordrun.dist import torch_private

pytestmark = pytest.mark.timeout(300)

SMALL = shlex.split("""
    model=nano
    data=text tokenizer=byte data.path=documents.jsonl tracker=jsonl train.dtype=fp32
    train.device=cpu train.max_iters=4 train.log_interval=1 train.eval_interval=2 train.eval_iters=1
    train.sample_tokens=2 train.sample_prompt=The train.global_batch_size=4 train.save_best=false
    optimizer.warmup_iters=2 optimizer.learning_rate=2e-3 model.n_layer=2 model.n_head=4 model.n_embd=32
    model.block_size=32 metrics=[accuracy]
""")
MODELS = {
    "gpt": ["model.bias=true"],
    "llama": ["model=llama_debug", "model.n_kv_head=2", "model.n_hidden=40", "data.mask_documents=true"],
    "window": ["model=llama_debug", "model.n_hidden=40", "model.window=9", "data.mask_documents=true"],
    "modern": [
        *shlex.split("model=modern model.n_hidden=48 model.ngram_rows=[31,15] model.value_layers=[1] model.mlp=relu2"),
        *shlex.split("model.norm_weights=false model.embed_norm=true model.softcap=15 optimizer=adamw schedule=cosine"),
    ],
    "preset": ["model=modern", "model.n_hidden=48", "model.zero_init=false"],
}
TP = 2 if torch_private.pipeline_takes_tensor_parallel() else 1
FSDP, PP = ["train.backend=FSDP", "model.batch_size=4"], ["train.backend=PP", "model.batch_size=4", "metrics=[]"]
TWO = {
    "gpt-heads": [*FSDP, "backend.cp=2"],
    "gpt-gather": [*FSDP, "backend.cp=2", "backend.cp_attention=gather", "train.activation_checkpointing=full"],
    "llama-heads": [*FSDP, "backend.cp=2"],
    "llama-gather": [*FSDP, "backend.cp=2", "backend.cp_attention=gather"],
    "modern-heads": [*FSDP, "backend.cp=2", "train.activation_checkpointing=selective"],
    "modern-gather": [
        *FSDP,
        "backend.cp=2",
        "backend.cp_attention=gather",
        "train.activation_checkpointing=selective",
    ],
    "preset-heads": [*FSDP, "backend.cp=2"],
    "window-gather": [*FSDP, "backend.cp=2", "backend.cp_attention=gather"],
}
FOUR = {
    "gpt-four": [*FSDP, "backend.cp=4"],
    "llama-gather-four": [*FSDP, "backend.cp=4", "backend.cp_attention=gather"],
    "llama-shard": ["train.backend=FSDP", "backend.cp=2", "backend.cp_attention=gather", "model.batch_size=2"],
    "gpt-tp": ["train.backend=TP", "backend.tp=2", "backend.cp=2", "model.batch_size=4"],
    "llama-tp": [
        "train.backend=TP",
        "backend.tp=2",
        "backend.cp=2",
        "backend.cp_attention=gather",
        "model.batch_size=4",
    ],
    "modern-pp": [*PP, "backend.pp=2", "backend.cp=2"],
    "llama-pp": [*PP, "backend.pp=2", "backend.cp=2", "backend.cp_attention=gather"],
}
WITH_BF16 = "torch_private.cpu_is_fast_at_bf16 = lambda: True"  # so that bf16 is not replaced


def train(ranks: Any, n: int, runs: dict[str, list[str]]) -> None:
    models = {name: MODELS[name.partition("-")[0]] for name in runs}
    together.train(ranks, n, {name: [*SMALL, *models[name], *words] for name, words in runs.items()}, WITH_BF16)


def figures(name: str, first: int = 0) -> dict[str, list[float]]:
    """Return what the run ``name`` reported after step ``first``."""
    lines = [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "grad_norm", "val_loss", "val_accuracy")
    return {key: [line[key] for line in lines if key in line and line["step"] > first] for key in keys}


def compare(name: str, first: int = 0) -> None:
    """Fail unless the run ``name`` went as one process did."""
    reference = f"{name.partition('-')[0]}-one"
    ours, theirs = figures(name, first), figures(reference, first)
    if name.endswith("pp"):
        theirs["val_accuracy"] = []
    assert theirs["loss"][0] > theirs["loss"][-1]
    for key, tolerance in (("loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-3), ("val_accuracy", 1e-5)):
        assert ours[key] == pytest.approx(theirs[key], rel=tolerance), f"{name}: {key}"
    last, their_last = ((Path(run) / "samples.txt").read_text().rpartition("---")[2] for run in (name, reference))
    assert last == their_last


def test_sequences_divided_among_ranks_go_as_whole_ones(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(ranks, 1, {f"{model}-one": ["model.batch_size=4"] for model in MODELS})
    half = ["train.max_iters=2", "optimizer.lr_decay_iters=4", "train.checkpoint_interval=2"]
    bf16 = [*FSDP, "backend.cp=2", "train.dtype=bf16"]
    train(ranks, 2, TWO | {"gpt-half": [*FSDP, "backend.cp=2", *half], "llama-bf16": bf16})
    for name in TWO:
        compare(name)
    assert figures("llama-bf16")["loss"] == pytest.approx(figures("llama-one")["loss"], rel=1e-2)
    train(
        ranks,
        4,
        FOUR | {"gpt-resumed": [*FSDP, "model.batch_size=1", "optimizer.lr_decay_iters=4", "train.resume=gpt-half"]},
    )
    for name in FOUR:
        compare(name)
    compare("gpt-resumed", first=2)
