"""Parts that wordrun could not call are named before anything is prepared, with file, line and what is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wordrun import Trainer, compose
from wordrun.backend import TorchBackend
from wordrun.common.errors import ConfigError
from wordrun.config.registry import Part
from wordrun.data.prepare.sources.base import Source
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.model import GPT
from wordrun.track.base import AppendOnlyTracker, Tracker
from wordrun.train.hooks import Hook
from wordrun.train.metrics import MetricOfSums
from wordrun.train.profile import Profiler
from wordrun.train.signatures import check

LINE = r"\(.*test_signatures\.py:\d+\)"


class NoTrainer(Hook):
    def __init__(self, options: Any) -> None: ...

    def after_step(self) -> None: ...  # type: ignore[override]


class NoOptions(Hook):
    def __init__(self) -> None: ...


class NoMethod(Hook):
    def __init__(self, options: Any) -> None: ...

    stop_reason = "the target is reached"  # type: ignore[assignment]


class NoBase:
    def __init__(self, options: Any) -> None: ...


class Misspelled(Hook):
    def __init__(self, options: Any) -> None: ...

    def after_steps(self, trainer: Any) -> None: ...


class NoStep(AppendOnlyTracker):
    def append(self, metrics: dict[str, Any]) -> None: ...  # type: ignore[override]


class Rewinds(Tracker):
    def rewind(self, step: int) -> None: ...  # type: ignore[override]


class Ticks(Profiler):
    def step(self, number: int) -> None: ...  # type: ignore[override]


class NoTexts(Tokenizer):
    @classmethod
    def from_json(cls) -> Any: ...  # type: ignore[override]


class NoItem(Source):
    def documents(self) -> Any: ...  # type: ignore[override]


class NoLast(TorchBackend):
    def micro_step(self, batch: Any) -> Tensor: ...  # type: ignore[override]


class NoOutputs(nn.Module):
    def losses(self, batch: Any) -> Tensor: ...

    def metrics(self, batch: Any) -> dict[str, Tensor]: ...


class NoName(GPT):
    def initial_std(self) -> float: ...  # type: ignore[override]


class NoBatch(MetricOfSums):
    def sums(self, outputs: Tensor) -> Tensor: ...  # type: ignore[override]


def no_parameters(cfg: Any) -> torch.optim.Optimizer: ...


def no_lowest(cfg: Any, step: int, steps: int, highest: float) -> float: ...


def no_batch(options: Any, outputs: Tensor) -> Tensor: ...


def ok(options: Any, outputs: Tensor, *rest: Any, scale: float = 1.0) -> Tensor: ...


class Good(Hook):
    def __init__(self, options: Any, more: int = 1) -> None: ...

    def helper(self) -> None: ...

    def after_step(self, *args: Any) -> None: ...

    def learning_rate(self, of: Any, scheduled: float, /) -> float: ...


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("hooks", NoTrainer, rf"NoTrainer\.after_step\(self\) {LINE} should take \(self, trainer\)"),
        ("hooks", NoOptions, rf"NoOptions\(\) {LINE} should take \(options\)"),
        ("hooks", NoMethod, r"NoMethod\.stop_reason should be a method \(self\), not str"),
        ("hooks", NoBase, rf"NoBase {LINE} should derive from wordrun\.train\.hooks\.base\.Hook"),
        ("tracker", NoStep, rf"NoStep\.append\(self, metrics\) {LINE} should take \(self, step, metrics\)"),
        ("tracker", Rewinds, rf"Rewinds\.rewind\(self, step\) {LINE} should take \(self, step, logged\)"),
        ("profiler", Ticks, rf"Ticks\.step\(self, number\) {LINE} should take \(self\)"),
        ("tokenizer", NoTexts, rf"NoTexts\.from_json\(cls\) {LINE} should take \(cls, text\)"),
        ("data", NoItem, rf"NoItem\.documents\(self\) {LINE} should take \(self, item\)"),
        ("backend", NoLast, rf"NoLast\.micro_step\(self, batch\) {LINE} should take \(self, batch, \*, last\)"),
        ("model", NoOutputs, rf"NoOutputs\.metrics\(self, batch\) {LINE} should take \(self, batch, outputs\)"),
        ("model", NoName, rf"NoName\.initial_std\(self\) {LINE} should take \(self, name\)"),
        ("optimizer", no_parameters, rf"no_parameters\(cfg\) {LINE} should take \(cfg, parameters\)"),
        ("schedule", no_lowest, rf"no_lowest\(.*\) {LINE} should take \(cfg, step, steps, highest, lowest\)"),
        ("metrics", NoBatch, rf"NoBatch\.sums\(self, outputs\) {LINE} should take \(self, outputs, batch\)"),
        ("metrics", NoBase, rf"NoBase {LINE} should derive from wordrun\.train\.metrics\.MetricOfSums"),
        ("metrics", no_batch, rf"no_batch\(options, outputs\) {LINE} should take \(options, outputs, batch\)"),
    ],
)
def test_a_part_that_cannot_be_called_is_named(kind: str, code: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{kind}=mine \(my\.module\): {message}"):
        check(Part("my.options:Options", code, kind, "mine", "my.module"))


@pytest.mark.parametrize(("kind", "code"), [("metrics", ok), ("hooks", Good)])
def test_other_names_defaults_and_more_arguments_are_accepted(
    kind: str, code: Any, caplog: pytest.LogCaptureFixture
) -> None:
    check(Part("my.options:Options", code, kind, "mine", "my.module"))
    assert not caplog.records


def test_a_method_with_nearly_the_name_of_one_is_named(caplog: pytest.LogCaptureFixture) -> None:
    check(Part("my.options:Options", Misspelled, "hooks", "mine", "my.module"))
    assert "does not call Misspelled.after_steps (" in caplog.text
    assert "did you mean after_step?" in caplog.text


def test_hooks_passed_to_a_trainer_are_checked_before_the_data_are_prepared() -> None:
    cfg = compose(["data=text", "data.path=/no/such/file", "tracker=jsonl", "train.device=cpu"])
    with pytest.raises(ConfigError, match=rf"NoTrainer\.after_step\(self\) {LINE} should take \(self, trainer\)"):
        Trainer(cfg, hooks=[NoTrainer(None)])
