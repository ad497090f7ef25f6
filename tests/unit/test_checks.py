"""Invalid parallel configs: all problems are found together, without starting ranks."""

from __future__ import annotations

import pytest

import wordrun
from wordrun.backend.options import PPConfig
from wordrun.common.errors import ConfigError


def problems(*words: str, ranks: int = 4, per_node: int | None = None) -> str:
    """Return what is wrong with a config on ``ranks`` ranks."""
    with pytest.raises(ConfigError) as caught:
        wordrun.compose(["data=sample", *words], ranks=ranks, per_node=per_node)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "ranks", "says"),
    [
        (
            ["train.backend=FSDP"],
            1,
            "train.backend=FSDP shards the model across ranks, but there is only one: use launch -n 2",
        ),
        (
            ["train.backend=TP", "backend.tp=3"],
            3,
            "model.n_head=4 is not divisible by backend.tp=3: use model.n_head=6",
        ),
        (
            ["train.backend=TP", "model.vocab_size=65"],
            2,
            "model.vocab_size=65 is not divisible by backend.tp=2: use model.vocab_size=66, or omit it",
        ),
        (["train.backend=TP", "model=llama_debug"], 4, "model.n_kv_head=2"),
        (["train.backend=PP"], 8, "a pipeline of 8 stages (backend.pp=8, backend.schedule=1F1B) needs as many blocks"),
        (["train.backend=PP", "backend.schedule=ZBVZeroBubble"], 4, "a pipeline of 8 stages"),
        (["train.backend=PP", "backend.schedule=1f1b"], 4, "backend.schedule=1f1b should be one of GPipe, 1F1B"),
        (
            ["train.backend=PP", "backend.microbatches=5"],
            4,
            "backend.microbatches=5 does not divide model.batch_size=16",
        ),
        (
            ["train.backend=PP", "model.batch_size=3"],
            4,
            "needs a multiple of backend.pp=4 micro-batches in a step, not 1",
        ),
        (
            ["train.backend=FSDP", "backend.cp=3", "model.n_head=3", "model.n_embd=96"],
            3,
            "each rank has an early and a late chunk of every sequence; use model.block_size=126, or backend.cp=1",
        ),
        (
            ["train.backend=FSDP", "backend.cp=4", "backend.cp_attention=heads", "model.n_head=2"],
            4,
            "n_head=2 over backend.cp=4 x backend.tp=1 = 4 ranks: use backend.cp_attention=gather, or backend.cp=2",
        ),
        (
            ["train.backend=FSDP", "backend.cp=4", "model.n_head=2", "model.dropout=0.1"],
            4,
            "model.dropout=0.1 is not for backend.cp_attention=gather, which attends again",
        ),
        (
            ["train.backend=TP", "backend.cp=2", "backend.tp=2", "backend.cp_attention=heads", "model.n_head=2"],
            4,
            "n_head=2 over backend.cp=2 x backend.tp=2 = 4 ranks: use backend.cp_attention=gather, or backend.cp=1",
        ),
        (["train.backend=FSDP", "backend.cp_attention=rings"], 4, "backend.cp_attention=rings should be one of auto"),
        (["train.backend=FSDP", "data=digits", "model=convnet", "backend.cp=4"], 4, "its sequences can be split"),
        (
            ["train.backend=deepspeed", "backend.stage=3", "train.chunked_loss=true"],
            2,
            "train.chunked_loss=true: with backend.stage=3, DeepSpeed gathers",
        ),
        (["train.backend=3D"], 6, "backend.pp=2 x backend.tp=2 = 4 does not fit 6 ranks"),
        (["train.backend=FSDP", "train.dtype=fp16"], 4, "train.dtype=fp16 needs a loss scaler"),
        (["train.backend=FSDP", "backend.reduce_dtype=fp8"], 4, "backend.reduce_dtype=fp8 should be one of fp32, bf16"),
        (
            ["backend.static_graph=true", "optimizer.gas=2"],
            4,
            "backend.static_graph=true reduces gradients in every backward pass",
        ),
        (
            ["backend.static_graph=true", "backend.find_unused_parameters=true"],
            4,
            "backend.static_graph=true finds unused parameters by itself, in the first step: omit",
        ),
        (["backend.compress=fp16"], 4, "backend.compress=fp16 should be one of none, bf16"),
        (["train.activation_checkpointing=some"], 4, "train.activation_checkpointing=some should be one of"),
        (["train.activation_checkpointing=0"], 4, "train.activation_checkpointing=0 should be one of"),
        (["train.backend=FSDP", "train.global_batch_size=50"], 4, "x 4 data-parallel ranks = 64: use 64"),
        (["train.backend=TP", "train.global_batch_size=30"], 4, "x 1 data-parallel ranks = 16: use 16 or 32"),
    ],
)
def test_a_clear_message(words: list[str], ranks: int, says: str) -> None:
    assert says in problems(*words, ranks=ranks)


@pytest.mark.parametrize(
    "key",
    ["backend.shard=2", "backend.cp=2", "backend.tp=2", "train.compile=true", "train.activation_checkpointing=full"],
)
def test_what_zero_bubble_schedules_do_not_support(key: str) -> None:
    words = ("train.backend=PP", "backend.pp=2", "backend.schedule=InterleavedZeroBubble", key)
    assert "splits the backward pass in two, which" in problems(*words)


def test_all_problems_together() -> None:
    words = ["model=nano", "train.backend=3D", "model.n_head=3", "model.n_layer=1", "model.n_embd=129"]
    assert "train.top_k=0" in problems(*words, "train.top_k=0", ranks=8)
    found = problems(*words, ranks=8)
    for words in ("model.n_head=3 is not", "model.n_embd=129 is not", "a pipeline of 2 stages"):
        assert words in found


def test_tensor_parallel_groups_fit_into_nodes() -> None:
    cfg = wordrun.compose(["data=sample", "train.backend=TP"], ranks=8, per_node=4)
    assert cfg.backend.layout(8, 4).shape == (1, 1, 2, 1, 4)
    assert "backend.tp=8 would span nodes" in problems(
        "train.backend=TP", "backend.tp=8", "model.n_head=8", ranks=8, per_node=4
    )


def test_stages_and_micro_batches() -> None:
    assert [PPConfig(schedule=name).stages(4) for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")] == [
        4,
        4,
        8,
        8,
    ]
    cfg = wordrun.compose(["data=sample", "train.backend=PP", "model.batch_size=12"], ranks=4)
    assert PPConfig().microbatches_of(cfg.model.batch_size, 4) == 4
    assert PPConfig(microbatches=6).microbatches_of(cfg.model.batch_size, 4) == 6
    cfg.model.batch_size = 6
    assert PPConfig().microbatches_of(cfg.model.batch_size, 4) == 2
