"""Activations within a memory budget, and activations in host memory."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wordrun
from wordrun import model as models
from wordrun.backend.compile import prepare
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.dist.mesh import Layout
from wordrun.model.options import GPTConfig, LlamaConfig, TransformerConfig
from wordrun.plan.memory import memory
from wordrun.plan.memory_fit import Fit, settings, within_budget
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.plan.strategy import Strategy
from wordrun.train.options import checkpointing_of

SMALL = shlex.split("""
    model=nano
    data=sample train.dtype=fp32 train.device=cpu model.n_layer=4 model.n_head=2 model.n_embd=32
    model.block_size=64 model.batch_size=8
""")


def fit(*words: str, ranks: int = 1) -> Fit:
    cfg = compose([*SMALL, *words])
    return Fit(cfg, shapes_of(cfg.model, 64), check(cfg, ranks, ranks), ranks, on_cpu=True)


def needs(run: Fit) -> dict[str, float]:
    """Return the bytes that ``run`` needs with each setting."""
    found = {}
    for setting in settings(run.cfg):
        cfg = replace(run.cfg, train=replace(run.cfg.train, activation_checkpointing=setting))
        found[setting] = replace(run, cfg=cfg).need.total
    return found


def test_settings_name_what_happens_to_each_block() -> None:
    found = {setting: "".join(checkpointing_of(setting, n)[0] for n in range(4)) for setting in settings(fit().cfg)}
    assert found == {
        "none": "nnnn",
        "selective:1": "snnn",
        "selective:2": "ssnn",
        "selective:3": "sssn",
        "selective": "ssss",
        "full:1+selective:3": "fsss",
        "full:2+selective:2": "ffss",
        "full:3+selective:1": "fffs",
        "full": "ffff",
    }
    assert [checkpointing_of("2", n) for n in range(3)] == ["full", "none", "full"]
    assert [checkpointing_of("full:1", n) for n in range(2)] == ["full", "none"]
    assert list(settings(fit("train.backend=PP", ranks=2).cfg)) == ["none", "selective", "full"]


def test_no_more_is_recomputed_than_the_budget_requires() -> None:
    every = needs(fit())
    assert sorted(every.values(), reverse=True) == list(every.values())
    for setting, need in every.items():
        chosen = within_budget(fit(f"train.memory_budget_gb={need / 1e9 * 1.0001}"))
        assert chosen.cfg.train.activation_checkpointing == setting
        assert chosen.need.total == need
    assert within_budget(fit()).cfg.train.activation_checkpointing == "none"


def test_a_budget_that_is_too_small_is_refused_with_what_would_do() -> None:
    run = fit()
    least = min(needs(run).values()) / 1e9
    with pytest.raises(ConfigError) as caught:
        within_budget(fit(f"train.memory_budget_gb={least * 0.9}"))
    first, second = str(caught.value).splitlines()
    assert f"this run needs at least {least:.4g} GB on each rank, with train.activation_checkpointing=full" in first
    assert "largest model.batch_size that fits is" in second


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.memory_budget_gb=0"], "train.memory_budget_gb=0.0 should be a number above 0"),
        (["train.memory_budget_gb=1", "train.activation_checkpointing=full"], "omit one of the two"),
        (["train.activation_checkpointing=full:2+none:3"], "should be one of none, full, selective, N, full:N"),
        (["train.activation_offload=true"], "train.device=cpu has no other memory"),
        (["train.activation_offload=true", "train.device=cuda", "train.compile=true"], "leaves to the compiler"),
        (["train.activation_offload=true", "train.activation_checkpointing=2"], "recomputes what this would keep"),
    ],
)
def test_contradictions_are_named(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose([*SMALL, *words]))
    assert says in str(caught.value)


def test_a_model_without_an_estimate_has_no_budget(tmp_path: Path) -> None:
    words = ["data=digits", "model=convnet", "train.memory_budget_gb=1", f"hydra.run.dir={tmp_path}/run"]
    with pytest.raises(ConfigError, match=r"none for model=convnet: set train\.activation_checkpointing"):
        wordrun.Trainer(compose(words))


def test_offloading_needs_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    cfg = compose([*SMALL, "train.device=auto", "train.activation_offload=true", f"hydra.run.dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match="this run is on CPUs, where they are in host memory"):
        wordrun.Trainer(cfg, wordrun.dist.World(device="cpu"))


def test_a_run_within_a_budget_says_what_it_recomputes(tmp_path: Path) -> None:
    every = needs(fit())
    words = [
        *SMALL,
        *shlex.split("""
        tokenizer=byte tracker=jsonl train.max_iters=1 train.eval_interval=0
        train.sample_tokens=0 train.checkpoint_interval=0
    """),
        f"hydra.run.dir={tmp_path}/run",
    ]
    cfg = compose(words)
    size = shapes_of(cfg.model, 257)
    plan = {s: memory(size, Strategy("", cfg, Layout(), on_cpu=True), s).total / 1e9 for s in every}
    budget = (plan["selective:2"] + plan["selective:1"]) / 2
    with wordrun.Trainer(compose([*words, f"train.memory_budget_gb={budget}"])) as trainer:
        forwards = [block.forward for block in trainer.backend.parts[0].blocks.children()]
        trainer.train()
    assert [hasattr(forward, "keywords") for forward in forwards] == [True, True, False, False]
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "train.activation_checkpointing=selective:2, and each rank needs about" in said


MODELS = {  # whose activations of 10 sequences, and the weights of whose MLPs, have more than 2^16 elements
    "gpt": GPTConfig(n_layer=2, n_head=2, n_embd=132, block_size=64, batch_size=10, bias=True),
    "llama": LlamaConfig(n_layer=2, n_head=6, n_kv_head=3, n_embd=132, n_hidden=528, block_size=64, batch_size=10),
}


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("bf16", [False, True])
def test_offloaded_activations_give_the_same_gradients(
    cfg: TransformerConfig, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks' own path, with host memory on both sides; only the streams are missing."""
    copied: Counter[tuple[int, ...]] = Counter()
    hooks = torch.autograd.graph.saved_tensors_hooks

    def counted(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
        def counting(tensor: torch.Tensor) -> Any:
            kept = pack(tensor)
            copied[tuple(tensor.shape)] += kept is not tensor
            return kept

        return hooks(counting, unpack)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", counted)
    tokens = torch.randint(61, (10, 65), generator=torch.Generator().manual_seed(0))
    gradients = []
    for on in (False, True):
        run = compose(["data=sample"])
        run.train.activation_offload = on
        model = models.build(cfg, 61)
        prepare(model, run)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            model.losses(wordrun.data.batch.Batch(tokens[:, :-1], tokens[:, 1:])).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert bool(+copied) == on
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.equal(theirs)
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    assert all(math.prod(shape) >= 2**16 for shape in +copied)
    assert not {shape for shape in +copied if shape in weights or shape[::-1] in weights}
