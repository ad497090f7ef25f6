"""Muon: what it orthogonalizes, its steps, and what it leaves to AdamW."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from wordrun import model as models
from wordrun.backend.param_groups import NamedParameters, remember_ratios, set_learning_rate
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.model.base import Rows
from wordrun.model.options import ConvNetConfig, GPTConfig, LlamaConfig
from wordrun.train.optim.muon import Muon, divided, iterations, joined, momentum_at, orthogonalized
from wordrun.train.optim.options import MuonConfig

EXACT = [1.5, -0.5, 0.0] * 40
"""Coefficients of iterations that converge to the orthogonal matrix, slowly."""


def polar(matrix: Tensor) -> Tensor:
    """Return U V' of U S V'."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (u @ v).float()


def test_matrices_of_any_shape_become_orthogonal() -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in ((4, 6), (5, 5), (6, 4), (4, 6), (3, 30), (1, 7))]
    exact = orthogonalized(matrices, iterations(MuonConfig(ns_steps=40, ns_coefficients=EXACT)))
    for matrix, found in zip(matrices, exact, strict=True):
        torch.testing.assert_close(found, polar(matrix), rtol=1e-3, atol=1e-4)
    for found in orthogonalized(matrices, iterations(MuonConfig())):
        singular = torch.linalg.svdvals(found)
        assert singular.max() < 1.3, "five iterations make them only about orthogonal"
    (zero,) = orthogonalized([torch.zeros(3, 4)], iterations(MuonConfig()))
    assert not zero.any()


def test_a_matrix_divides_into_queries_keys_and_values() -> None:
    stored = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)  # heads, kinds, size, inputs
    parts = divided(stored.view(24, 5), Rows(heads=2, kinds=3))
    assert parts.shape == (3, 8, 5)
    torch.testing.assert_close(parts[1], torch.cat([stored[0, 1], stored[1, 1]]))
    torch.testing.assert_close(joined(parts, Rows(2, 3), torch.Size((24, 5))), stored.view(24, 5))


def test_models_say_which_matrices_are_hidden() -> None:
    gpt = models.build(GPTConfig(n_layer=2, n_head=2, n_embd=8, bias=True), 11).matrices()
    layers = ("attention.qkv", "attention.proj", "mlp.up", "mlp.proj")
    assert list(gpt) == [f"blocks.{number}.{layer}.weight" for number in range(2) for layer in layers]
    assert gpt["blocks.1.attention.qkv.weight"] == Rows(2, 3)
    assert gpt["blocks.1.mlp.up.weight"] == Rows()
    llama = models.build(LlamaConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=16, n_hidden=24), 11).matrices()
    assert [llama[f"blocks.0.attention.{name}.weight"].heads for name in "qkv"] == [4, 2, 2]
    assert not {"tokens.weight", "head.weight"} & llama.keys()


def test_without_blocks_all_but_the_first_and_the_last_matrix_are_hidden() -> None:
    net = models.new_model(ConvNetConfig(), shape=(3, 32, 32), classes=10)
    assert list(net.matrices()) == ["features.3.weight", "classifier.0.weight"]


def muon(cfg: MuonConfig, parameters: dict[str, Tensor], **hidden: Rows) -> Muon:
    """Return the optimizer of ``parameters``, of which ``hidden`` are matrices."""
    named = NamedParameters(((name, torch.nn.Parameter(p.clone())) for name, p in parameters.items()), hidden)
    optimizer = Muon(cfg, named)
    remember_ratios(optimizer, cfg.learning_rate)
    return optimizer


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "factor"), [("adamw", 0.2 * math.sqrt(6)), ("spectral", math.sqrt(6 / 4))])
def test_two_steps_by_hand(nesterov: bool, scale: str, factor: float) -> None:
    torch.manual_seed(0)
    weight, first, second = torch.randn(3, 6, 4)
    cfg = MuonConfig(
        learning_rate=0.1,
        weight_decay=0.5,
        momentum=0.8,
        nesterov=nesterov,
        scale=scale,
        ns_steps=40,
        ns_coefficients=EXACT,
    )
    optimizer = muon(cfg, {"w": weight}, w=Rows())
    mean = torch.zeros(6, 4)
    (parameter,) = optimizer.param_groups[0]["params"]
    for gradient in (first, second):
        parameter.grad = gradient.clone()
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient
        step = polar(0.2 * gradient + 0.8 * mean if nesterov else mean)
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * factor * step
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-3, atol=1e-3)


def test_cautious_decay_leaves_weights_that_grow() -> None:
    cfg = MuonConfig(
        learning_rate=0.1, weight_decay=0.5, cautious=True, scale="spectral", ns_steps=40, ns_coefficients=EXACT
    )
    optimizer = muon(cfg, {"w": torch.tensor([[2.0, 0.0], [0.0, 2.0]])}, w=Rows())
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.diag(torch.tensor([2 - 0.1 * 0.5 * 2 - 0.1, 2 + 0.1])))


def test_queries_keys_and_values_are_orthogonalized_separately() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(12, 4)
    for split, count in (("none", 1), ("qkv", 3), ("heads", 6)):
        cfg = MuonConfig(
            learning_rate=1.0,
            weight_decay=0.0,
            nesterov=False,
            scale="spectral",
            split=split,
            ns_steps=40,
            ns_coefficients=EXACT,
        )
        optimizer = muon(cfg, {"w": torch.zeros(12, 4)}, w=Rows(heads=2, kinds=3))
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = gradient.clone()
        optimizer.step()
        step = -parameter.detach() / math.sqrt({1: 12 / 4, 3: 1, 6: 1}[count])  # each by its own shape
        by_head = step.view(2, 3, 2, 4)
        part = {"none": step, "qkv": by_head[:, 1].reshape(4, 4), "heads": by_head[1, 2]}[split]
        narrow = part if part.shape[0] <= part.shape[1] else part.mT
        torch.testing.assert_close(narrow @ narrow.mT, torch.eye(len(narrow)), rtol=1e-2, atol=1e-2)
        assert step.square().sum() == pytest.approx({1: 4, 3: 12, 6: 12}[count], rel=1e-2)


def test_the_rest_is_adamws_at_a_rate_of_its_own() -> None:
    torch.manual_seed(0)
    weights = {"table": torch.randn(5, 3), "norm": torch.randn(3)}
    cfg = MuonConfig(learning_rate=0.02, adamw_lr=0.1, adamw_weight_decay=0.3, beta1=0.8, beta2=0.95)
    optimizer = muon(cfg, weights)
    theirs = [torch.nn.Parameter(p.clone()) for p in weights.values()]
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95), fused=True)
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(3):
        set_learning_rate(optimizer, 0.01)  # half the peak, for both
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad = torch.randn_like(mine)
        optimizer.step()
        adamw.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_a_loaded_state_continues_bit_for_bit() -> None:
    torch.manual_seed(0)
    weights = {"w": torch.randn(4, 4), "norm": torch.randn(4)}
    cfg = MuonConfig(momentum_warmup=4)
    gradients = torch.randn(6, 2, 4, 4)

    def train(optimizer: Muon, steps: range) -> None:
        for number in steps:
            for p, gradient in zip(
                (p for g in optimizer.param_groups for p in g["params"]), gradients[number], strict=True
            ):
                p.grad = gradient[: len(p)].clone() if p.dim() > 1 else gradient[0].clone()
            optimizer.step()

    through = muon(cfg, weights, w=Rows())
    train(through, range(6))
    first = muon(cfg, weights, w=Rows())
    train(first, range(3))
    now = dict(zip(("w", "norm"), (p.detach() for g in first.param_groups for p in g["params"]), strict=True))
    second = muon(cfg, now, w=Rows())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, range(3, 6))
    ends = [[p for g in each.param_groups for p in g["params"]] for each in (through, second)]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_the_momentum_warms_up() -> None:
    cfg = MuonConfig(momentum=0.95, momentum_start=0.85, momentum_warmup=10)
    assert [momentum_at(cfg, step) for step in (1, 6, 11, 50)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert momentum_at(MuonConfig(), 1) == 0.95


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["optimizer.ns_coefficients=[1,2]"], r"ns_coefficients has 2 numbers: use 3, or 3 for each of the"),
        (["optimizer.split=all"], r"optimizer\.split=all"),
        (["optimizer.momentum=1.5"], r"optimizer\.momentum=1\.5"),
        (["optimizer.adamw_lr=0"], r"optimizer\.adamw_lr=0"),
        (["train.backend=deepspeed"], r"optimizer=muon needs whole matrices, but train\.backend=deepspeed"),
    ],
)
def test_wrong_options_are_named(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(compose(["optimizer=muon", *words]))
