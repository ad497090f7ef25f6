"""float8 linear layers: what is converted, what is refused. Their products are emulated here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from wordrun import model as models
from wordrun.backend import float8
from wordrun.commands import plan as plan_cli
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.model.options import GPTConfig
from wordrun.plan.estimator import Estimate, Unavailable

CFG = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the products of float8 values in fp32."""
    pytest.importorskip("torchao.float8", exc_type=ImportError, reason="pip install 'wordrun[float8]'")
    settings: Callable[[str], Any] = float8.settings
    monkeypatch.setattr(float8, "settings", lambda recipe: replace(settings(recipe), emulate=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.usefixtures("emulated")
def test_losses_and_gradients_are_near_those_in_full_precision(recipe: str) -> None:
    tokens, targets = torch.randint(64, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for converted in (False, True):
        model = models.build(CFG, 64)
        before = dict(model.named_parameters())
        for block in model.blocks.values():
            if converted:
                float8.convert(block, recipe)
        assert [*dict(model.named_parameters()).items()] == [*before.items()]
        model(tokens, targets=targets).sum().backward()
        found.append({name: p.grad for name, p in before.items()})
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    kinds = {name: type(module).__name__ for name, module in linear.items()}
    assert kinds.pop("head") == "OutputLayer"
    assert {*kinds.values()} == {"Float8Linear"}
    assert len(kinds) == 4 * 2
    for name, exact in found[0].items():
        error = (found[1][name] - exact).norm() / exact.norm()
        assert 0 < error < 0.15, (name, error)


@pytest.mark.usefixtures("emulated")
def test_layers_of_other_sizes_stay_as_they_are() -> None:
    block = torch.nn.ModuleDict({"a": torch.nn.Linear(32, 48), "b": torch.nn.Linear(32, 40)})
    float8.convert(block, "tensorwise")
    assert [type(layer).__name__ for layer in block.values()] == ["Float8Linear", "Linear"]
    with pytest.raises(ConfigError, match=r"multiples of 16, but the blocks of this model have 8 x 32: use"):
        float8.convert(torch.nn.Sequential(torch.nn.Linear(8, 32)), "tensorwise")


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.float8=rowwise needs .* 9\.0 or higher, but this device is a cpu"):
        float8.require("rowwise", torch.device("cpu"))


@pytest.mark.parametrize(
    ("found", "suits"), [((8, 0), []), ((8, 9), ["tensorwise"]), ((9, 0), ["tensorwise", "rowwise"])]
)
def test_the_compute_capability_decides(
    found: tuple[int, int], suits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Kind of GPU")
    imported: list[str] = []
    monkeypatch.setattr(float8, "torchao", imported.append)
    for recipe in float8.CAPABILITY:
        if recipe in suits:
            float8.require(recipe, torch.device("cuda"))
        else:
            with pytest.raises(ConfigError, match=rf"this Kind of GPU has {found[0]}\.{found[1]}: use"):
                float8.require(recipe, torch.device("cuda"))
    assert len(imported) == len(suits)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"pip install 'wordrun\[float8\]'"):
        float8.settings("tensorwise")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.float8=fp8"], r"train\.float8=fp8 should be one of none, tensorwise, rowwise"),
        (["train.float8=rowwise", "train.dtype=fp16"], r"not from train\.dtype=fp16: use train\.dtype=bf16"),
        (
            ["train.float8=rowwise", "train.backend=PP"],
            r"which train\.backend=PP lacks: use train\.backend=FSDP or DDP",
        ),
        (["train.float8=rowwise", "train.backend=TP", "backend.tp=2"], r"which train\.backend=TP"),
        (["train.float8=rowwise", "train.backend=diloco"], r"which train\.backend=diloco"),
        (["train.float8=rowwise", "model.lora_rank=4"], "LoRA has other matrix products"),
        (["train.float8=rowwise", "model=moe_debug"], "experts have other matrix products"),
    ],
)
def test_what_it_does_not_go_with_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(compose(words))


def test_the_plan_knows_which_devices_have_it() -> None:
    words = ["model=gpt2", "train.float8=tensorwise", "plan.devices=2"]
    report = plan_cli.plan([*words, "plan.device=h100-80"])
    refused = {row.name: row.reason for row in report.rows if isinstance(row, Unavailable)}
    fits = [row.strategy.name for row in report.rows if isinstance(row, Estimate)]
    assert any(name.startswith("DDP") for name in fits)
    assert any(name.startswith("FSDP") for name in fits)
    assert not [name for name in fits if name.startswith(("TP", "PP", "DeepSpeed"))]
    assert any("train.float8=tensorwise needs whole layers" in reason for reason in refused.values())
    with pytest.raises(ConfigError, match=r"GPU of the Ada or Hopper generation or later, which plan\.device=a100-40"):
        plan_cli.plan([*words, "plan.device=a100-40"])
