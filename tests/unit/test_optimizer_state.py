"""Optimizers of others: what they keep in their groups and states, what they leave out, and what cannot be saved."""

from __future__ import annotations

import copy
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wordrun
from wordrun.backend.optimizer_state import GROUPS, GroupValues, SavedState, StateError
from wordrun.checkpoint.folder import DamagedError
from wordrun.checkpoint.index import load
from wordrun.common.errors import ConfigError
from wordrun.config.registry import Part, parts
from wordrun.config.schema import Config
from wordrun.model.options import ModelConfig
from wordrun.train.optim.options import OptimizerConfig

DIGITS = shlex.split("""
    data=digits model=small_net optimizer=other tracker=jsonl train.dtype=fp32 train.device=cpu
    train.max_iters=6 train.log_interval=1 train.eval_interval=0 model.batch_size=8 schedule=constant
    optimizer.warmup_iters=0 optimizer.learning_rate=0.1 hydra.run.dir=run
""")


@dataclass
class SmallConfig(ModelConfig):
    """Two layers, the first of which may be frozen."""

    frozen: bool = False
    """Freeze the first layer."""


class Small(nn.Module):
    def __init__(self, cfg: SmallConfig, shape: Any, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(64, 8).requires_grad_(not cfg.frozen)
        self.head = nn.Linear(8, classes)

    def losses(self, batch: Any) -> torch.Tensor:
        outputs = self.head(torch.tanh(self.body(batch.inputs.flatten(1))))
        return F.cross_entropy(outputs, batch.targets, reduction="none")


@dataclass
class OtherConfig(OptimizerConfig):
    """Nothing to say."""


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that registers a function as optimizer=other, and returns the config of a short run."""
    monkeypatch.setitem(parts("model"), "small_net", Part(SmallConfig, Small, "model", "small_net", "mine/parts.py:3"))

    def register(make: Any, *words: str) -> Config:
        part = Part(OtherConfig, make, "optimizer", "other", "mine/parts.py:7")
        monkeypatch.setitem(parts("optimizer"), "other", part)
        return wordrun.compose([*DIGITS, *words])

    return register


def trained(cfg: Config) -> tuple[list[float], Any]:
    """Return the losses and the optimizer of a run."""
    with wordrun.Trainer(cfg) as trainer:
        trainer.train()
    lines = [json.loads(line) for line in Path(cfg.run_dir, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], trainer.backend.optimizer  # type: ignore[attr-defined]


class Estimating(torch.optim.Optimizer):
    """Has values in its groups, as Prodigy has, and states of other types than the parameters'."""

    def __init__(self, cfg: OtherConfig, parameters: Any) -> None:
        defaults = {"lr": cfg.learning_rate, "k": 0, "d": 1.0, "seen": None, "weight_sum": torch.zeros(1)}
        super().__init__([p for _, p in parameters], defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 0.9
            group["seen"] = (group["k"], "steps")
            group["weight_sum"] += group["d"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"mean": torch.zeros_like(p, dtype=torch.bfloat16), "step": 0}
                    state |= {"count": torch.zeros((), dtype=torch.int64), "wide": torch.zeros(3, dtype=torch.float64)}
                state["count"] += 1
                state["step"] += 1
                state["wide"] += 1e-12
                state["mean"].mul_(0.9).add_(p.grad.to(torch.bfloat16), alpha=0.1)
                rate = group["lr"] * group["d"] / group["weight_sum"].item()
                p.add_(state["mean"].to(p.dtype), alpha=-rate * state["count"].item())


def test_values_of_groups_and_dtypes_of_states_are_resumed_to_the_bit(other: Any) -> None:
    whole, expected = trained(other(Estimating, "train.checkpoint_interval=3"))
    start = "train.resume=run/checkpoints/step-00000003"
    again, resumed = trained(other(Estimating, start, "hydra.run.dir=again"))
    assert again == whole
    for ours, theirs in zip(resumed.param_groups, expected.param_groups, strict=True):
        assert (ours["k"], ours["d"], ours["seen"]) == (theirs["k"], theirs["d"], (6, "steps"))
        assert torch.equal(ours["weight_sum"], theirs["weight_sum"])
    for ours, theirs in zip(resumed.state.values(), expected.state.values(), strict=True):
        assert {key: getattr(value, "dtype", int) for key, value in ours.items()} == {
            "mean": torch.bfloat16,
            "step": int,
            "count": torch.int64,
            "wide": torch.float64,
        }
        assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in theirs)


def test_only_what_has_changed_is_in_a_checkpoint(other: Any) -> None:
    trained(other(lambda cfg, named: torch.optim.AdamW([p for _, p in named], lr=0.1), "train.max_iters=1"))
    assert not [name for name in load(Path("run/checkpoints/step-00000001")) if name.startswith(GROUPS)]
    trained(other(Estimating, "train.max_iters=1", "hydra.run.dir=changed"))
    stored = load(Path("changed/checkpoints/step-00000001"))
    assert [name for name in stored if name.startswith(GROUPS)] == ["groups.body.weight"]


def sgd() -> tuple[torch.optim.Optimizer, dict[nn.Parameter, str]]:
    weights = {nn.Parameter(torch.ones(2)): name for name in ("a", "b", "c")}
    a, b, c = weights
    return torch.optim.SGD([{"params": [a, b]}, {"params": [c]}, {"params": []}], lr=0.1), weights


VALUES = {
    "count": 7,
    "rate": 0.1,
    "infinite": float("inf"),
    "on": True,
    "name": "x",
    "none": None,
    "list": [1, [2.5]],
    "tuple": (0.9, 0.99),
    "dict": {"best": 3},
    "tensor": torch.tensor([0.1]),
    "steps": torch.tensor(3),
}


def test_values_of_groups_come_back_as_they_were() -> None:
    optimizer, names = sgd()
    saved = GroupValues(optimizer, "optimizer=other")
    before = copy.deepcopy([{**group, "params": []} for group in optimizer.param_groups])
    assert saved.tensors(names, "a") == {}
    for number, group in enumerate(optimizer.param_groups):
        group |= {"number": number, "momentum": 0.5 + number, "nesterov": True}
    optimizer.param_groups[1] |= VALUES
    (text,) = saved.tensors(names, "a").values()
    fresh, their_names = sgd()
    a, b, c = their_names
    fresh.param_groups[:] = [
        {**fresh.param_groups[0], "params": [c]},
        {**fresh.param_groups[0], "params": [b, a]},
        {**fresh.param_groups[0], "params": []},
    ]
    restored = GroupValues(fresh, "optimizer=other")
    restored.load([text], their_names)
    assert [group["number"] for group in fresh.param_groups] == [1, 0, 2], "groups are found by their parameters"
    assert [group["momentum"] for group in fresh.param_groups] == [1.5, 0.5, 2.5]
    found = {key: fresh.param_groups[0][key] for key in VALUES}
    assert repr(found) == repr(VALUES)
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in VALUES.items()}
    saved.load([], names)  # as a rollback to a checkpoint from before the changes
    assert [{**group, "params": []} for group in optimizer.param_groups] == before


def test_the_size_of_saved_values_does_not_depend_on_numbers() -> None:
    """Ranks with different estimates write, and describe, tensors of one shape."""
    optimizer, names = sgd()
    saved, sizes = GroupValues(optimizer, "optimizer=other"), set()
    for d, k in ((0.1, 9), (1 / 3, 10), (-1e300, -123456)):
        optimizer.param_groups[0] |= {"d": d, "k": k}
        sizes.add(saved.tensors(names, "a")["groups.a"].numel())
    assert len(sizes) == 1


@pytest.mark.parametrize("value", [{1}, {1: 2}, torch.zeros(2), lambda: None])
def test_a_changed_value_that_cannot_be_saved_is_named(value: Any) -> None:
    optimizer, names = sgd()
    optimizer.param_groups[0]["kept"] = value
    saved = SavedState(optimizer, "optimizer=other (mine.py:7)", lambda **_: [("a", next(iter(names)))], checks=True)
    saved.check()  # it has not changed
    optimizer.param_groups[1]["cache"] = value
    message = (
        rf"^optimizer=other \(mine.py:7\) changes 'cache' of its parameter groups, a {type(value).__name__} that a "
        r"checkpoint cannot hold: keep it as a tensor in self.state\[p\], or train without checkpoints"
    )
    with pytest.raises(StateError, match=message):
        saved.tensors()


def test_values_that_cannot_be_read_are_a_damaged_checkpoint(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        json,
        "dumps",
        lambda value, real=json.dumps, **kw: real(value, **kw).replace(
            '"d": {', '"d": [' if isinstance(value, list) and value and "names" in value[0] else "\0"
        ),
    )
    trained(other(Estimating, "train.max_iters=1"))
    with pytest.raises(DamagedError, match=r"step-00000001 is damaged: groups\.body\.weight: "):
        wordrun.Trainer(other(Estimating, "train.resume=auto"))


class Listing(torch.optim.SGD):
    kept: ClassVar[Any] = [1, 2]

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = self.kept


class Packed(torch.Tensor):
    """A tensor that is not torch's own, as torchao's states are."""


class Packing(Listing):
    kept: ClassVar[Any] = torch.zeros(2).as_subclass(Packed)


class Numbering(Listing):
    def step(self, closure: Any = None) -> Any:
        super().step()
        for state in self.state.values():
            state[0] = state.pop("history")


def both(cfg: Any, named: Any) -> Any:
    return [torch.optim.SGD([p], lr=0.1) for _, p in named]


def with_schedule(cfg: Any, named: Any) -> Any:
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (both, ConfigError, " should return one torch optimizer, not list; a schedule is a separate part"),
        (with_schedule, ConfigError, " should return one torch optimizer, not tuple; a schedule is a separate part"),
        (torch.optim.LBFGS, ConfigError, ": LBFGS.step needs a closure, and steps with closures are not supported: "),
        (Listing, StateError, " keeps history of body.weight as list, which a checkpoint cannot hold: keep a tensor"),
        (Packing, StateError, " keeps history of body.weight as Packed, a kind of tensor that a checkpoint cannot "),
        (Numbering, StateError, " keeps a state of body.weight under the key 0: use a string without a dot"),
    ],
)
def test_what_cannot_be_trained_with_is_named_before_the_second_step(
    other: Any, make: Any, error: Any, said: str
) -> None:
    if isinstance(make, type):
        kind: Any = make
        make = lambda cfg, named: kind([p for _, p in named], lr=0.1)  # noqa: E731
    with pytest.raises(error) as caught:
        trained(other(make))
    assert str(caught.value).startswith(f"optimizer=other (mine/parts.py:7){said}")
    log = Path("run/metrics.jsonl")
    assert not log.exists() or not log.read_text()
    if error is StateError:
        assert str(caught.value).endswith("(train.checkpoint_interval=0)") == ("key 0" not in said)
        losses, _ = trained(other(make, "train.checkpoint_interval=0", "hydra.run.dir=unsaved"))
        assert len(losses) == 6


def head_only(cfg: Any, named: Any) -> Any:
    return torch.optim.SGD([p for name, p in named if name.startswith("head")], lr=0.1)


def test_trainable_parameters_that_an_optimizer_leaves_out_are_named(
    other: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with wordrun.Trainer(other(head_only)) as trainer:
        trainer.train()
        assert all(p.grad is None for p in trainer.backend.parts[0].parameters()), "or they would grow in the norm"
    said = "optimizer=other (mine/parts.py:7) leaves out 2 of 4 trainable parameters: body.weight, body.bias (set "
    assert " ".join(capsys.readouterr().out.split()).count(f"{said}requires_grad=False if that is intended)") == 1
    assert said in Path("run/log.txt").read_text()
    trained(other(head_only, "model.frozen=true", "hydra.run.dir=frozen"))
    assert "leaves out" not in Path("frozen/log.txt").read_text()
