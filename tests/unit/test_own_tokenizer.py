"""A tokenizer from outside wordrun: samples, streamed text, exports, and what a run says about them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wordrun
from wordrun import cli
from wordrun.checkpoint.load import find
from wordrun.commands import generate
from wordrun.commands.chat import Chat
from wordrun.commands.export import main as export
from wordrun.common.errors import ConfigError, PartError
from wordrun.config.registry import Part, parts
from wordrun.data.options import TextConfig
from wordrun.data.tokenizers.base import END, Ids, Tokenizer
from wordrun.data.tokenizers.options import TokenizerConfig
from wordrun.train import failing
from wordrun.train.hooks.base import Hook
from wordrun.train.trainer import Trainer

TEXT = "The quick brown fox jumps über the lazy dog .\n" * 60


@dataclass
class SplitConfig(TokenizerConfig):
    """Words, and an end-of-text token if wanted."""

    name: str = "split"
    """Name of the tokenizer."""
    ends: bool = False
    """Whether there is an end-of-text token."""

    @property
    def built_from(self) -> str:
        """What the tokenizer is built from."""
        return "sample"


class Split(Tokenizer):
    """Splits text at whitespace, so that a line break has no tokens, and decodes with a space between two words."""

    kind = "split"

    def __init__(self, words: list[str], *, ends: bool) -> None:
        self.words, self.eot, self.vocab_size = words, len(words) if ends else None, len(words) + ends

    @classmethod
    def build(cls, cfg: SplitConfig, texts: Iterable[str] = ()) -> Split:
        return cls(["?", *sorted({word for text in texts for word in text.split()})], ends=cfg.ends)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        known = {word: number for number, word in enumerate(self.words)}
        return [np.array([known.get(word, 0) for word in text.split()], dtype=np.int64) for text in texts]

    def decode(self, tokens: Ids) -> str:
        return " ".join([*self.words, END][token] for token in tokens.tolist())  # an array, as the interface says

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "words": self.words, "ends": self.eot is not None})

    @classmethod
    def from_json(cls, text: str) -> Split:
        content = json.loads(text)
        return cls(content["words"], ends=content["ends"])


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts("tokenizer"), "split", Part(SplitConfig, Split, "tokenizer", "split", "mine/parts.py:4"))


@pytest.fixture
def words(small: Any) -> list[str]:
    """The words of a command line that trains with the tokenizer."""
    Path("words.txt").write_text(TEXT)
    found: list[str] = small("tokenizer=split", "data.path=words.txt", "hydra.run.dir=run")
    return found


def generated(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    assert generate.main(["run=run", "device=cpu", "dtype=fp32", *options]) == 0
    return capsys.readouterr().out


def test_a_prompt_without_tokens_is_refused_before_training(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = r"train.sample_prompt='\n' has no tokens with tokenizer=split: set train.sample_prompt=TEXT, or "
    with pytest.raises(ConfigError) as refused:
        Trainer(wordrun.compose(words))
    assert str(refused.value) == f"{wanted}train.sample_tokens=0 for no samples"
    assert not Path("run").exists()
    assert cli.main([*words, "train.sample_tokens=0"]) == 0
    capsys.readouterr()
    assert generate.main(["run=run"]) == 2
    assert "prompt='\\n' has no tokens with tokenizer=split: set prompt=TEXT\n" in capsys.readouterr().err
    with Trainer(wordrun.compose([*words, "train.sample_tokens=0", "hydra.run.dir=other"])) as trainer:
        with pytest.raises(ConfigError, match=r"^prompt='  ' has no tokens with tokenizer=split: set prompt=TEXT"):
            trainer.generate("  ")
        assert trainer.generate("The fox", 3).startswith("The fox ")


def test_text_begins_after_the_end_of_text_if_the_prompt_has_no_tokens(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """That token is not shown. The streamed text is that of all tokens, with a space between two words."""
    assert cli.main([*words, "tokenizer.ends=true", "train.temperature=0.7"]) == 0
    _, sample = Path("run/samples.txt").read_text().strip().split("\n", 1)
    assert len(sample.split()) == 8
    assert not sample.startswith(END)
    options = ("length=8", "temperature=0.7")
    assert generated(capsys, *options).strip() == sample.strip()
    two = generated(capsys, *options, "num_samples=2").splitlines()
    assert [len(line.split()) for line in two[1::2]] == [8, 8]
    assert END not in (two[1].split()[0], two[3].split()[0])
    assert len(generated(capsys, "prompt=The quick", "length=5").split()) == 7


def test_a_conversation_of_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The space between the prompt and the answer is shown; a first turn without tokens is refused."""
    tokenizer = Split(["?", "one", "two"], ends=False)

    def speak(tokens: torch.Tensor, on_tokens: Any, stop: list[int]) -> torch.Tensor:
        for token in (1, 2, 2):
            on_tokens(torch.tensor([token]))
        return tokens

    chat = Chat(speak, tokenizer, TextConfig(template="{prompt}{answer}"))
    with pytest.raises(ConfigError, match="' ' has no tokens with tokenizer=split: write something else"):
        chat.answer(" ")
    chat.answer("two one")
    assert capsys.readouterr().out == " one two two\n"
    assert tokenizer.decode(np.array(chat.tokens)) == "two one one two two"


def test_the_suggested_export_works(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "train.sample_prompt=The"]) == 0
    (line,) = (line for line in capfd.readouterr().out.splitlines() if " export run=" in line)
    assert line.endswith("wordrun export run=run form=checkpoint")
    assert export(["run=run"]) == 1
    refusal = (
        "a tokenizer of the kind split cannot be converted to a format that transformers reads: wordrun export "
        "form=checkpoint writes weights and tokenizer in wordrun's own format\n"
    )
    assert refusal in capfd.readouterr().err
    assert not Path("run/huggingface").exists()
    assert export([*shlex.split(line)[-2:], "out=weights"]) == 0
    assert json.loads(find(Path("weights")).tokenizer_json)["kind"] == "split"


def test_a_sample_that_fails_does_not_end_the_run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    modes = []

    def decode(self: Split, tokens: Ids) -> str:
        raise ValueError("no such word")

    monkeypatch.setattr(Split, "decode", decode)
    watch = Hook()
    monkeypatch.setattr(watch, "before_step", lambda trainer: modes.append(trainer.backend.parts[0].training))
    words += ["train.sample_prompt=The", "train.sample_interval=2"]
    with Trainer(wordrun.compose(words), hooks=[watch]) as trainer:
        trainer.train()
    assert modes == 4 * [True], "the sample at step 2 has left evaluation mode"
    record = json.loads(Path("run/run.json").read_text())
    assert (record["exit_reason"], record["steps"]) == ("finished", 4)
    said = capfd.readouterr().out
    cause = "the run continues without it: tokenizer=split (mine/parts.py:4): Split failed: ValueError: no such word"
    for step in (2, 4):
        assert f"the sample at step {step} failed, {cause}" in said
    assert "traceback: run/failures/rank-0.txt" in said
    assert "next: generate text" in said
    assert "no such word" in Path("run/failures/rank-0.txt").read_text()
    assert find(Path("run")).step == 4


def test_an_error_about_other_ranks_ends_the_run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So does one that other ranks do not have."""

    def lost(self: Any, *options: Any) -> str:
        torch.distributed.broadcast(torch.zeros(1), src=7)
        return ""

    monkeypatch.setattr(Trainer, "generate", lost)
    words += ["train.sample_prompt=The", "train.checkpoint_interval=0"]
    with Trainer(wordrun.compose(words)) as trainer, pytest.raises((RuntimeError, ValueError), match="rank"):
        trainer.train()
    monkeypatch.setattr(Trainer, "generate", lambda self: 1 / 0)
    monkeypatch.setattr(failing.dist, "monitored_barrier", lambda *args: False)
    words.append("hydra.run.dir=other")
    with Trainer(wordrun.compose(words)) as trainer, pytest.raises(PartError, match="ZeroDivisionError"):
        trainer.train()


def test_a_run_that_failed_after_its_last_step_is_not_continued(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    last = Hook()

    def fail(trainer: Any) -> None:
        raise RuntimeError("late")

    monkeypatch.setattr(last, "at_end", fail)
    words.append("train.sample_tokens=0")
    with pytest.raises(PartError, match="late"), Trainer(wordrun.compose(words), hooks=[last]) as trainer:
        trainer.train()
    assert json.loads(Path("run/run.json").read_text())["complete"] is True
    said = capfd.readouterr().out
    assert "validation loss" in said
    assert "to continue from" not in said
