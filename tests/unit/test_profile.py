"""Profilers: what each writes, when, and on which ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

import wordrun
from wordrun import dist
from wordrun.config import ProfilerConfig
from wordrun.errors import ConfigError
from wordrun.registry import Part, parts
from wordrun.train.profile import Profiler, build


def test_pyinstrument_writes_html_and_text(small: Callable[..., list[str]], tmp_path: Path) -> None:
    words = small("profiler=pyinstrument", f"hydra.run.dir={tmp_path}/run", "train.max_iters=30")
    with wordrun.Trainer(wordrun.compose(words)) as trainer:
        trainer.train()
    text = (tmp_path / "run" / "profile" / "pyinstrument.txt").read_text()
    assert "train_step" in text
    assert "trainer.py" in text
    html = (tmp_path / "run" / "profile" / "pyinstrument.html").read_text()
    assert html.startswith("<!DOCTYPE html>")
    assert "train_step" in html
    assert "pyinstrument.html" in (tmp_path / "run" / "log.txt").read_text()


def test_torch_records_the_steps_of_its_schedule(small: Callable[..., list[str]], tmp_path: Path) -> None:
    words = small("profiler=torch", "profiler.wait=1", "profiler.warmup=1", "profiler.active=2", "train.max_iters=6")
    with wordrun.Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        trainer.train()
    events = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert {name for name in names if str(name).startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}
    assert "aten::mm" in names


class Recorder(Profiler):
    """Notes what it is told."""

    calls: ClassVar[list[str]] = []

    def start(self) -> None:
        self.calls.append("start")

    def step(self) -> None:
        self.calls.append("step")

    def stop(self) -> None:
        self.calls.append(f"stop {self.file('x.txt').name}")


@pytest.mark.parametrize(("rank", "name"), [(0, "x.txt"), (2, "x-rank-2.txt")])
def test_a_profiler_runs_on_the_ranks_that_it_is_asked_for(
    rank: int, name: str, small: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(ProfilerConfig, f"{__name__}:Recorder")
    monkeypatch.setitem(parts("profiler"), "none", part)
    monkeypatch.setattr(Recorder, "calls", [])
    cfg = wordrun.compose(small(f"hydra.run.dir={tmp_path}/run", f"profiler.ranks=[{rank}]"))
    for each in range(3):
        with build(cfg, dist.World(rank=each, size=3)) as profiler:
            profiler.step()
    assert Recorder.calls == ["start", "step", f"stop {name}"]
    with pytest.raises(ConfigError, match=r"profiler\.ranks=\[\d\] should be below the number of ranks, 0"):
        build(cfg, dist.World(rank=0, size=0))
    with pytest.raises(ConfigError, match=r"profiler\.ranks=\[-1\] should not be negative"):
        wordrun.compose(["profiler.ranks=[-1]"])


def test_the_trainer_starts_steps_and_stops_it(
    small: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parts("profiler"), "none", Part(ProfilerConfig, f"{__name__}:Recorder"))
    monkeypatch.setattr(Recorder, "calls", [])
    with wordrun.Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))) as trainer:
        trainer.train()
    assert Recorder.calls == ["start", *["step"] * 4, "stop x.txt"]


def test_without_a_profiler_there_is_no_profile(small: Callable[..., list[str]], tmp_path: Path) -> None:
    with wordrun.Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))) as trainer:
        trainer.train()
    assert not (tmp_path / "run" / "profile").exists()
