"""The state of a run: what changes it, what a checkpoint keeps of it, and what else keeps state beside it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import wordrun
from wordrun.checkpoint.load import find
from wordrun.common.errors import ConfigError
from wordrun.config.registry import Part, parts
from wordrun.track.base import Tracker
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.track.options import TrackerConfig
from wordrun.train.hooks.early_stop import EarlyStop
from wordrun.train.hooks.options import EarlyStopConfig
from wordrun.train.state import TrainState
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]


def train(words: list[str], folder: Path, **options: Any) -> Trainer:
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"]), **options) as trainer:
        trainer.train()
    return trainer


def test_a_step_that_is_skipped_takes_data_and_does_not_count() -> None:
    state = TrainState()
    for skipped in (False, True, True, False):
        state.take(8)
        if skipped:
            state.skip_step()
        else:
            state.count_step()
    assert (state.step, state.position, state.skipped) == (2, 32, 0)


def test_the_best_evaluation_is_the_lowest_and_never_nan() -> None:
    state = TrainState()
    for loss in (math.nan, 3.0, 2.0, math.nan, 2.5):
        state.count_step()
        state.record_evaluation({"val_loss": loss})
    assert (state.best_loss, state.best_step, state.evaluated_step) == (2.0, 3, 5)
    assert state.metrics["val_loss"] == 2.5


def test_a_rollback_keeps_position_time_and_earlier_rollbacks() -> None:
    state = TrainState(step=6, position=48, best_loss=2.0, best_step=4, metrics={"loss": 2.5, "dt": 1.0}, seconds=10.0)
    stored = json.loads(json.dumps(state.state_dict()))
    state.take(16)
    state.count_step()
    state.record_evaluation({"val_loss": 1.0})
    for times in (1, 2):
        state.roll_back(stored)
        assert (state.step, state.position, state.best_loss, state.best_step) == (6, 64, 2.0, 4)
        assert state.rollbacks == {6: times}
        assert state.metrics == {"loss": 2.5}
    assert state.elapsed() == 10.0
    assert json.loads(json.dumps(state.state_dict()))["rollbacks"] == {"6": 2}


# What a checkpoint keeps


def test_the_state_survives_a_checkpoint() -> None:
    state = TrainState(
        step=7,
        position=56,
        metrics={"loss": 2.5, "val_loss": 3.0, "tps": 1.0},
        best_loss=2.75,
        best_step=4,
        evaluated_step=6,
        skipped=2,
        rollbacks={4: 1},
        seconds=12.5,
    )
    loaded = TrainState()
    loaded.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert loaded.metrics.pop("loss") == state.metrics.pop("loss")
    assert state.metrics.pop("tps")  # rates are those of the machine of that time
    assert loaded.spikes.state_dict() == state.spikes.state_dict()
    assert replace(loaded, spikes=state.spikes) == state


# Hooks by name


STOPPING = tuple(
    shlex.split("""
    train.max_iters=40 train.eval_interval=2 train.checkpoint_interval=4 train.log_interval=1
    optimizer.learning_rate=0.3 optimizer.warmup_iters=0 hooks=early_stop
    hooks.early_stop.patience=3
""")
)


def test_early_stop_counts_evaluations_without_an_improvement() -> None:
    hook = EarlyStop(EarlyStopConfig(patience=2, min_delta=0.1))
    trainer: Any = type("Trainer", (), {"state": TrainState(), "metrics": {}, "step": 0})()
    seen = []
    for loss in (3.0, 2.95, 2.8, math.nan, 2.75):
        trainer.state.count_step()
        trainer.state.record_evaluation({"val_loss": loss})
        trainer.step, trainer.metrics = trainer.state.step, trainer.state.metrics
        hook.after_step(trainer)
        seen.append(hook.waited)
        trainer.state.count_step()
        trainer.step = trainer.state.step
        hook.after_step(trainer)  # a step without an evaluation
    assert seen == [0, 1, 0, 1, 2]
    assert hook.stop_reason().startswith("stopped early: 2 evaluations without an improvement")


def test_a_run_that_stops_early_is_finished_and_the_same_when_resumed(small: Words, tmp_path: Path) -> None:
    whole = train(small(*STOPPING), tmp_path / "whole")
    assert 6 < whole.step < 40
    record = json.loads((tmp_path / "whole/run.json").read_text())
    assert (record["exit_reason"], record["steps"]) == ("finished", whole.step)
    assert find(tmp_path / "whole").step == whole.step
    assert "stopped early: 3 evaluations without an improvement" in (tmp_path / "whole/log.txt").read_text()
    (tmp_path / "whole").rename(tmp_path / "run")
    for folder in sorted((tmp_path / "run/checkpoints").glob("step-*")):
        if int(folder.name[5:]) > whole.step - 3:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    resumed = train(small(*STOPPING, "train.resume=auto"), tmp_path / "run")
    assert resumed.start.step < whole.step - 2
    assert resumed.step == whole.step
    lines = [line["step"] for line in read(tmp_path / "run") if "loss" in line]
    assert lines == list(range(1, whole.step + 1))
    assert train(small(*STOPPING, "train.resume=auto"), tmp_path / "run").step == whole.step, "nothing to do"
    longer = train(small(*STOPPING, "train.resume=auto", "hooks.early_stop.patience=4"), tmp_path / "run")
    assert longer.step > whole.step


def test_early_stop_needs_evaluations() -> None:
    with pytest.raises(ConfigError, match=r"hooks=\[early_stop\] needs evaluations, but train\.eval_interval=0"):
        wordrun.compose(["data=sample", "hooks=early_stop", "train.eval_interval=0"])


# Trackers and profilers


class Memory(Tracker):
    """The least that a tracker needs."""

    lines: ClassVar[list[dict[str, Any]]] = []

    def log(self, metrics: dict[str, Any]) -> None:
        self.lines.append(metrics)


def test_a_tracker_needs_only_log(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts("tracker"), "memory", Part(TrackerConfig, f"{__name__}:Memory"))
    monkeypatch.setattr(Memory, "lines", [])
    cfg = wordrun.compose(small("train.log_interval=1", "train.checkpoint_interval=2", f"hydra.run.dir={tmp_path}/run"))
    cfg.tracker["memory"] = TrackerConfig()
    with Trainer(cfg) as trainer:
        trainer.train()
    strip = [{name: value for name, value in line.items() if value is not None} for line in Memory.lines]
    assert strip == [{k: v for k, v in line.items() if v is not None} for line in read(tmp_path / "run")]
    Memory.lines.clear()
    # A branch begins with the history of its origin.
    cfg.train.resume, cfg.run_dir = f"{tmp_path}/run/checkpoints/step-00000002", str(tmp_path / "branch")
    with Trainer(cfg) as trainer:
        trainer.train()
    assert [line["step"] for line in Memory.lines if "loss" in line] == [1, 2, 3, 4]
