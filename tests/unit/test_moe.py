"""Mixtures of experts: what they compute, how they balance the load, and what is refused with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

import wordrun
from wordrun import model as models
from wordrun.backend.compile import prepare
from wordrun.backend.options import DDPConfig
from wordrun.common.errors import ConfigError
from wordrun.config.schema import Config
from wordrun.data.batch import Batch
from wordrun.dist import torch_private
from wordrun.model.moe import Experts, MixtureOfExperts, MoE
from wordrun.model.options import MoEConfig
from wordrun.train.optim.muon import divided, rows_for
from wordrun.train.trainer import Trainer

V = 61
SMALL = MoEConfig(n_layer=2, n_head=2, n_embd=32, n_hidden=48, block_size=16, n_experts=6, n_active=3, batch_size=3)
Words = Callable[..., list[str]]


def build(cfg: MoEConfig = SMALL, seed: int = 0) -> MixtureOfExperts:
    """Return a model in which the experts matter: with the usual first values, they contribute next to nothing."""
    model = cast("MixtureOfExperts", models.build(cfg, V, seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    return model


def batch(cfg: MoEConfig = SMALL, seed: int = 0) -> Batch:
    tokens = torch.randint(V, (cfg.batch_size, cfg.block_size + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def first(model: MixtureOfExperts) -> MoE:
    return cast("MoE", model.blocks["0"].mlp)


def by_hand(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Return what ``layer`` should compute: every expert of every token, most of them with a weight of 0."""
    cfg, experts = layer.router.cfg, layer.experts
    scores = F.linear(x, layer.router.weight)
    scores = scores.softmax(-1) if cfg.router == "softmax" else scores.sigmoid()
    chosen = (scores + layer.router.bias).topk(cfg.n_active).indices
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    if cfg.normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = (each.view(cfg.n_experts, -1, cfg.n_embd) for each in (experts.gate.weight, experts.up.weight))
    hidden = F.silu(torch.einsum("btc,ehc->bteh", x, gate)) * torch.einsum("btc,ehc->bteh", x, up)
    y = torch.einsum("bteh,ech,bte->btc", hidden, experts.proj.weight.view(cfg.n_experts, cfg.n_embd, -1), weights)
    return y if layer.shared is None else y + layer.shared(x)


@pytest.mark.parametrize("product", ["torch's", "one by one"])
@pytest.mark.parametrize(
    "cfg",
    [SMALL, replace(SMALL, router="sigmoid", n_shared=2), replace(SMALL, normalize_weights=False, n_active=1)],
    ids=["softmax", "sigmoid", "one"],
)
def test_each_token_gets_the_weighted_sum_of_its_experts(
    cfg: MoEConfig, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if product == "one by one":
        monkeypatch.setattr(torch_private, "grouped", torch_private.one_by_one)
    layer = first(build(cfg))
    layer.router.bias.copy_(torch.linspace(-0.1, 0.1, cfg.n_experts))  # two experts get hardly any tokens
    found = []
    for compute in (layer, lambda x: by_hand(layer, x)):
        x = torch.randn(3, 16, cfg.n_embd, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = compute(x)
        wanted = [x, *layer.parameters()]
        gradients = torch.autograd.grad(y, wanted, torch.linspace(-1, 1, y.numel()).view_as(y))
        found.append((y, *gradients))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_has_gradients_of_zero() -> None:
    layer = first(build())
    layer.router.bias[2] = -10
    layer(torch.randn(2, 5, SMALL.n_embd)).sum().backward()
    for weight in layer.experts.parameters():
        assert weight.grad is not None
        assert [bool(part.any()) for part in weight.grad.chunk(6)].count(False) >= 1
        assert not weight.grad.chunk(6)[2].any()


def test_bf16_differs_by_rounding_only() -> None:
    layer, x = first(build()), torch.randn(2, 16, SMALL.n_embd)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    assert (rounded - exact).abs().mean() < 0.02 * exact.abs().mean()


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_each_token_is_counted_once(checkpointing: str) -> None:
    cfg = Config(model=SMALL, backend=DDPConfig())
    cfg.train.activation_checkpointing = checkpointing
    model = build()
    prepare(model, cfg)
    for seed in range(2):
        model.losses(batch(seed=seed)).mean().backward()
    with torch.no_grad():
        model.losses(batch(seed=2))  # an evaluation
    for router in model.routers:
        assert router.counts.sum() == 2 * SMALL.n_active * SMALL.batch_size * SMALL.block_size
    before = torch.stack([router.counts for router in model.routers])
    model.complete_step(lambda loads: None)
    rate = SMALL.balance_rate
    for router, counts in zip(model.routers, before, strict=True):
        assert router.bias.equal(rate * (counts.double().mean() - counts).sign().float())
        assert not router.counts.any()
    loads = model.loads()
    assert loads is not None
    torch.testing.assert_close(loads, before / before.float().mean(1, keepdim=True))


def test_the_biases_balance_the_load() -> None:
    model = build(replace(SMALL, balance_rate=0.002))
    most = []
    for _ in range(60):
        model.losses(batch()).mean().backward()
        model.complete_step(lambda loads: None)
        loads = model.loads()
        assert loads is not None
        most.append(loads.max().item())
    assert most[0] > 1.4
    assert max(most[-5:]) < 1.25


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_gradient_of_the_balance_loss_is_added_and_its_value_is_not(checkpointing: str) -> None:
    gradients, losses = [], []
    for coefficient in (0.0, 0.3):
        model = build(replace(SMALL, balance_loss=coefficient))
        cfg = Config(model=SMALL, backend=DDPConfig())
        cfg.train.activation_checkpointing = checkpointing
        prepare(model, cfg)
        loss = model.losses(batch())
        (5 * loss).mean().backward()
        losses.append(loss.detach())
        gradients.append(model.routers[-1].weight.grad)
    assert losses[0].equal(losses[1])
    model, found = build(), list[torch.Tensor]()
    model.blocks["1"].mlp.register_forward_hook(lambda module, inputs, output: found.append(inputs[0]))
    model.losses(batch())
    router = model.routers[-1]
    scores = F.linear(found[0], router.weight).softmax(-1)
    each = F.one_hot(scores.topk(SMALL.n_active).indices, SMALL.n_experts).sum((1, 2))
    load = each / (SMALL.n_active * SMALL.block_size / SMALL.n_experts)
    assert router.weight.grad is None
    (5 * 0.3 * (load * scores.mean(1)).sum(-1)).mean().backward()
    assert gradients[0] is not None
    assert gradients[1] is not None
    torch.testing.assert_close(gradients[1] - gradients[0], router.weight.grad, rtol=1e-4, atol=1e-6)


def test_active_parameters_and_operations() -> None:
    cfg = replace(SMALL, n_shared=1)
    model = models.meta_model(cfg, V)
    expert = 3 * cfg.n_embd * cfg.n_hidden
    assert model.num_parameters() - model.num_active_parameters() == 2 * 3 * expert
    norms = (2 * 2 + 1) * cfg.n_embd
    products = model.num_active_parameters() - norms - V * cfg.n_embd  # all but the embedding
    assert model.flops_per_token() == 6 * products + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size


def test_each_expert_is_a_matrix_of_its_own_for_muon() -> None:
    found = models.meta_model(SMALL, V).matrices()
    for split in ("qkv", "heads", "none"):
        rows = rows_for(split, found["blocks.0.mlp.experts.proj.weight"])
        assert divided(torch.zeros(6 * 5, 3), rows).shape == (6, 5, 3)
    assert "blocks.0.mlp.router.weight" not in found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_logs_the_loads_and_resumes_exactly(optimizer: str, small: Words, tmp_path: Path) -> None:
    words = [
        "model=moe_debug",
        f"optimizer={optimizer}",
        *shlex.split("""
        model.n_experts=4 model.n_hidden=16 model.n_kv_head=1
        model.balance_rate=0.01 model.balance_loss=0.01 train.log_interval=1 optimizer.gas=2
        optimizer.lr_decay_iters=4 train.checkpoint_interval=2 train.sample_tokens=0
    """),
    ]

    def run(name: str, *more: str) -> list[dict[str, Any]]:
        cfg = wordrun.compose([*small(*words), *more, f"hydra.run.dir={tmp_path / name}"])
        with Trainer(cfg) as trainer:
            trainer.train()
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    lines = run("whole")
    loads = [line["expert_load"] for line in lines if "expert_load" in line]
    most = [line["expert_load_max"] for line in lines if "loss" in line]
    assert [len(each) for each in loads] == [1] * 4
    for load, highest in zip(loads, most, strict=True):
        assert sum(load[0]) == pytest.approx(4, abs=0.002)
        assert max(load[0]) == pytest.approx(highest, abs=0.001)
    run("half", "train.max_iters=2")
    again = run("half", "train.resume=auto")
    assert [line["loss"] for line in again if "loss" in line] == [line["loss"] for line in lines if "loss" in line]
    record = json.loads((tmp_path / "whole/run.json").read_text())
    assert record["parameters"] - record["active_parameters"] == 2 * 3 * 16 * 16


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.n_active=9"], "model.n_active=9 is more than model.n_experts=8: use model.n_active=8 or fewer"),
        (["model.router=top"], "model.router=top should be one of softmax, sigmoid"),
        (
            ["train.backend=FSDP", "backend.ep=3"],
            "backend.ep=3 does not divide the 4 ranks of backend.shard x backend.",
        ),
        (["train.backend=FSDP", "backend.ep=3"], "use backend.ep=1 or 2 or 4"),
        (
            ["train.backend=FSDP", "backend.ep=4", "model.n_experts=6"],
            "model.n_experts=6 is not divisible by backend.ep=4: use backend.ep=1 or 2, or model.n_experts=8",
        ),
        (
            ["train.backend=FSDP", "backend.ep=2", "model=nano"],
            "model=nano does not declare how its experts can be split",
        ),
        (["train.backend=TP"], "model=moe_debug does not declare how its matrices can be split across ranks"),
        (["train.backend=deepspeed"], "DeepSpeed's engine does not balance the load of experts"),
        (["model.lora_rank=4"], "model.lora_rank=4: LoRA has no adapters for experts"),
        (["model.mup=true"], "model.mup=true does not cover a mixture of experts"),
    ],
)
def test_what_does_not_work_says_what_does(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wordrun.compose(["data=sample", "model=moe_debug", *words], ranks=4)
    assert says in str(caught.value)


def test_torchs_product_where_it_works() -> None:
    rows, narrow = torch.randn(4, 32), torch.randn(4, 30)
    find = torch_private.grouped_product
    there = hasattr(F, "grouped_mm") and torch.__version__ >= "2.13"
    assert (find(rows, 48, torch.float32) is torch_private.grouped) == there
    assert find(narrow, 48, torch.float32) is torch_private.one_by_one  # rows of 120 bytes
    assert find(rows[:0], 48, torch.float32) is torch_private.one_by_one
    layer = Experts(SMALL)
    assert sorted(name for name, _ in layer.named_parameters()) == ["gate.weight", "proj.weight", "up.weight"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # in torch's compiler
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_compiled_blocks_route_as_others(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As far as g++, which takes minutes; with inductor's decompositions: without them, torch expects other strides of
    # roll's result than it has (2.8 and 2.13).
    whole: Any = torch.compile
    backend = {"backend": "aot_eager_decomp_partition"}
    monkeypatch.setattr(torch, "compile", lambda call, **options: whole(call, **{**options, **backend}))
    found = []
    for compiled in (False, True):
        cfg = Config(model=replace(SMALL, balance_loss=0.1), backend=DDPConfig())
        cfg.train.compile, cfg.train.compile_scope = compiled, scope
        model = build(replace(SMALL, balance_loss=0.1))
        prepare(model, cfg)
        for seed in range(2):  # other numbers of tokens for each expert
            loss = model.losses(batch(seed=seed))
            loss.mean().backward()
        found.append((loss.detach(), model.routers[0].weight.grad, model.routers[1].counts))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
