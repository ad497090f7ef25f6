"""Cases of tests/fuzz.py: twenty of one seed, and those that once failed, as small as they were found to be."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fuzz
import wordrun
from wordrun.common.validation import one_of
from wordrun.config import registry
from wordrun.model.options import GPTConfig

pytestmark = pytest.mark.timeout(600)
# As a failure prints them: the fault that each found.
FOUND: dict[str, str] = {
    "flops of a vocabulary padded for TP": """
        {"options": {"data": "file", "data.path": "text.txt", "model": "gpt", "tokenizer": "byte", "optimizer": "sgd",
        "train.global_batch_size": 8}, "how": {"train.backend": "TP", "model.batch_size": 4}, "ranks": 2}
    """,
    "muP's learning rates with DeepSpeed's stage 3": """
        {"options": {"data": "file", "data.path": "text.txt", "model": "gpt", "model.mup": true,
        "model.mup_base_width": 8, "tokenizer": "byte", "optimizer": "adamw", "optimizer.learning_rate": 0.003,
        "train.global_batch_size": 4}, "how": {"train.backend": "deepspeed", "backend.stage": 3,
        "backend.keep_below": 2, "model.batch_size": 2}, "ranks": 2}
    """,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    fuzz.write_inputs(folder)
    return folder


def test_twenty_cases_of_a_fixed_seed(home: Path) -> None:
    failed = fuzz.fuzz(1, range(20), home, shrinks=False)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", FOUND)
def test_what_once_failed(name: str, home: Path) -> None:
    assert not fuzz.examined(fuzz.Case(**json.loads(FOUND[name])), home / "case")


def test_new_options_and_parts_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their types, and for a choice by the message of its check."""

    @dataclass
    class Options(GPTConfig):
        name: str = "novel"
        """Name of the preset."""
        novel_scale: float = 2.0
        """A number."""
        novel_kind: str = "round"
        """A choice."""

        def problems(self) -> Any:
            return [*super().problems(), *one_of("model.novel_kind", self.novel_kind, ["round", "square"])]

    part = registry.Part(Options, "wordrun.model.gpt:GPT", "model", "novel")
    monkeypatch.setitem(registry.parts("model"), "novel", part)
    start = {"model": "novel", "train.global_batch_size": 4}
    drawn = [fuzz.drawn(random.Random(n), start, ["model"], lambda words: True) for n in range(40)]
    assert {options.get("model.novel_kind") for options in drawn} == {None, "square"}
    assert {options.get("model.novel_scale") for options in drawn} == {None, 0.0, 1.0, 3.0}


def test_a_command_says_what_a_case_trains() -> None:
    """The Config that is made without Hydra is the one that the printed command makes."""
    for number in (0, 4, 7):
        case = fuzz.draw_case(2, number)
        words = case.options | case.how
        overrides = shlex.split(fuzz.command(case.ranks, words))[6:]
        composed = wordrun.compose([*overrides, "hydra.run.dir=run"])
        composed.secrets.clear()
        ours = fuzz.config(words)
        ours.data.name, ours.model.name = composed.data.name, composed.model.name
        assert composed == ours
