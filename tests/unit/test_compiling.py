"""train.compile=auto: what it decides, that losses do not depend on it, and that a resumed run keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wordrun
from wordrun.backend.compile import compile_options
from wordrun.dist.mesh import Layout
from wordrun.train.hooks import compiling
from wordrun.train.hooks.compiling import STEPS, WARM
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # in torch's compiler
ENOUGH = 2 * (WARM + STEPS) + 2


@pytest.mark.parametrize(
    ("device", "layout", "compiled"),
    [("cpu", Layout(), True), ("cpu", Layout(pp=2, shard=2), True), ("cuda", Layout(), False)]
    + [("cpu", Layout(shard=2, **{axis: 2}), False) for axis in ("tp", "cp", "ep")],
)
def test_what_calls_the_kernels_is_compiled_unless_it_communicates(device: str, layout: Layout, compiled: bool) -> None:
    assert compile_options(torch.device(device), layout) == ({"cpp_wrapper": True} if compiled else None)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as far as g++, which takes minutes."""
    whole: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: whole(call, **{**options, "backend": "aot_eager"}))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def clock(before: float, after: float) -> SimpleNamespace:
    """Return a clock by which a step takes so many seconds, before the model is compiled and after."""

    def readings() -> Iterator[float]:
        now = 0.0
        for step in count():
            yield now
            now += before if step < WARM + STEPS else after
            yield now

    return SimpleNamespace(perf_counter=readings().__next__)


def run(words: list[str], folder: Path, *more: str) -> tuple[Trainer, dict[str, Any], list[float]]:
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}", *more])) as trainer:
        trainer.train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = json.loads((folder / "run.json").read_text())
    return trainer, record.get("compile", {}), [line["loss"] for line in lines if "loss" in line]


def is_compiled(trainer: Trainer) -> bool:
    (kinds,) = {block._compiled_call_impl is not None for block in trainer.backend.parts[0].blocks.children()}
    return kinds


@pytest.mark.parametrize(("pays", "scope"), [(True, "blocks"), (False, "blocks"), (False, "model")])
def test_it_keeps_what_is_faster_and_a_resumed_run_keeps_it_too(
    pays: bool, scope: str, small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = small("train.log_interval=1", "train.dtype=fp32", f"train.max_iters={ENOUGH}", "train.save_best=false")
    _, nothing, plain = run([*words, "train.compile=false"], tmp_path / "plain")
    words += ["train.compile=auto", f"train.compile_scope={scope}"]
    monkeypatch.setattr(compiling, "time", clock(40.0, 39.0 if pays else 39.4))
    trainer, noted, losses = run(words, tmp_path / "run")
    assert (nothing, noted["compiled"], trainer.state.compiled) == ({}, pays, pays)
    assert is_compiled(trainer) == pays
    assert trainer.backend.parts[0].compiled_loss == pays
    assert losses == pytest.approx(plain, rel=1e-5)
    (line,) = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "train.compile=auto" in line]
    assert f"train.compile=auto: {'compiled' if pays else 'not compiled'} (" in line
    assert " ms a step instead of 4e+04, after compiling for " in line
    again, noted, _ = run(words, tmp_path / "run", "train.resume=auto", f"train.max_iters={ENOUGH + 2}")
    assert is_compiled(again) == pays
    assert noted == {"compiled": pays, "reason": "as decided before the checkpoint"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.max_iters=8"], "8 steps are too few"),
        (["train.deterministic=true"], "train.deterministic=true does not cover torch.compile"),
        (["model.batch_size=1"], "about 299 s of training are too few to gain from it"),
    ],
)
def test_it_does_not_compile_what_cannot_gain(
    words: list[str], says: str, small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "time", clock(29.9, 1.0))
    trainer, noted, _ = run(small(f"train.max_iters={ENOUGH}", "train.compile=auto", *words), tmp_path / "run")
    assert noted["compiled"] is False
    assert says in noted["reason"]
    assert not is_compiled(trainer)


def test_a_compiler_that_fails_is_no_reason_to_stop(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(call: Any, **options: Any) -> Any:
        raise RuntimeError("Python.h: No such file or directory\nmore")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiling, "time", clock(40.0, 1.0))
    trainer, noted, _ = run(small("train.compile=auto", f"train.max_iters={ENOUGH}"), tmp_path / "run")
    assert noted == {"compiled": False, "reason": "torch.compile failed: Python.h: No such file or directory"}
    assert not is_compiled(trainer)


def test_it_does_not_compile_without_a_compiler(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    trainer, noted, _ = run(small("train.compile=auto", f"train.max_iters={ENOUGH}"), tmp_path / "run")
    assert noted == {"compiled": False, "reason": "no compiler: /no/such/compiler is not installed"}
    assert not is_compiled(trainer)
