"""Trackers besides W&B: their records, read back by their own libraries, and what happens when one fails."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import wordrun
from wordrun.common.errors import UserError
from wordrun.config.registry import Part, parts
from wordrun.track.base import Tracker
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.track.options import TrackerConfig

Words = Callable[..., list[str]]


def train(words: list[str], *more: str, steps: int = 4) -> wordrun.Trainer:
    """Run ``steps`` steps, every one logged and every second one saved."""
    words = [word for word in words if word != "tracker=jsonl"]
    often = ["train.log_interval=1", "train.checkpoint_interval=2", f"train.max_iters={steps}"]
    with wordrun.Trainer(wordrun.compose([*words, *often, *more])) as trainer:
        trainer.train()
    return trainer


def train_and_resume(words: list[str], folder: Path) -> None:
    """Run 4 steps, lose the last checkpoint, and continue from step 2 to step 6."""
    train(words, f"hydra.run.dir={folder}")
    shutil.rmtree(folder / "checkpoints/step-00000004")
    trainer = train(words, "train.resume=auto", f"hydra.run.dir={folder}", steps=6)
    assert trainer.start.step == 2


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of each metric in metrics.jsonl."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in read(folder):
        for name, value in line.items():
            if value is not None and name != "step":
                found.setdefault(name, []).append((line["step"], value))
    return found


def same(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> bool:
    """Return whether two curves are equal in single precision."""
    return [step for step, _ in ours] == [step for step, _ in theirs] and all(
        math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )


# The page's example


def test_the_pages_tracker_records_no_row_twice(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples/parts/mine")
    monkeypatch.delitem(sys.modules, "csv_file", raising=False)
    module = importlib.import_module("csv_file")
    monkeypatch.setitem(parts("tracker"), "csv", Part(module.CsvConfig, module.CsvTracker, "tracker", "csv", "here:1"))

    train_and_resume(small("tracker=csv", "train.eval_interval=0"), tmp_path / "run")
    rows = (tmp_path / "run/losses.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]


# TensorBoard


def tensorboard(folder: Path) -> Any:
    """Return what TensorBoard's server reads of a run."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), tensor_size_guidance={"scalars": 0, "text": 0})
    found.Reload()
    return found


def scalars(found: Any, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric in TensorBoard."""
    return [(event.step, event.tensor_proto.float_val[0]) for event in found.Tensors(name)]


@pytest.fixture(scope="module")
def board(small: Words, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the directory of a resumed run, and what TensorBoard reads of it."""
    folder = tmp_path_factory.mktemp("tensorboard") / "run"
    train_and_resume(small("tracker=tensorboard", "train.sample_interval=2"), folder)
    return folder, tensorboard(folder)


def test_tensorboard_shows_a_resumed_run_as_one_curve(board: tuple[Path, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, found = board
    expected = curves(folder)
    assert set(found.Tags()["tensors"]) >= set(expected)
    assert [step for step, _ in expected["loss"]] == [1, 2, 3, 4, 5, 6]
    for name, curve in expected.items():
        assert same(curve, scalars(found, name)), name
    scripts = EventAccumulator(str(folder / "tensorboard"))  # what people read scalars with
    scripts.Reload()
    assert same(expected["loss"], [(event.step, event.value) for event in scripts.Scalars("loss")])


def test_tensorboard_has_the_samples(board: tuple[Path, Any]) -> None:
    folder, found = board
    events = found.Tensors("sample/text_summary")
    assert [event.step for event in events] == [2, 4, 6]
    text = events[-1].tensor_proto.string_val[0].decode()
    last = (folder / "samples.txt").read_text().split("--- step 6 ---\n")[1].rstrip("\n")
    assert [line.removeprefix("    ") for line in text.rstrip("\n").split("\n")] == last.split("\n")


def test_tensorboard_has_the_config_as_hparams(board: tuple[Path, Any], text_file: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    content = board[1].SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = metadata.parse_session_start_info_plugin_data(content).hparams
    assert values["model.n_embd"].number_value == 16
    assert values["train.dtype"].string_value == "fp32"
    assert values["data.path"].string_value == str(text_file)
    assert values["optimizer.beta2"].number_value == pytest.approx(0.99)
    metrics = metadata.parse_experiment_plugin_data(
        board[1].SummaryMetadata("_hparams_/experiment").plugin_data.content
    ).metric_infos
    assert [metric.name.tag for metric in metrics] == ["loss", "val_loss"]


def test_a_rollback_hides_the_steps_after_it(small: Words, tmp_path: Path) -> None:
    from wordrun.track.base import RunInfo
    from wordrun.track.options import TensorBoardConfig
    from wordrun.track.tensorboard import TensorBoardTracker

    tracker = TensorBoardTracker(TensorBoardConfig(), RunInfo(wordrun.compose(small()), tmp_path, {}), {})
    for step in (1, 2, 3):
        tracker.log({"step": step, "loss": 1.0, "mfu": None})
    tracker.rewind(1, 3)
    tracker.log({"step": 2, "loss": float("nan")})
    tracker.finish({}, 0)
    first, second = scalars(tensorboard(tmp_path), "loss")
    assert (first, second[0]) == ((1, 1.0), 2)
    assert math.isnan(second[1])


def test_several_trackers_have_their_options_under_their_names(small: Words) -> None:
    words = [word for word in small() if word != "tracker=jsonl"]
    cfg = wordrun.compose([*words, "tracker=[wandb,tensorboard]", "tracker.wandb.project=shakes"])
    assert sorted(cfg.tracker) == ["jsonl", "tensorboard", "wandb"]
    assert cfg.tracker["wandb"].project == "shakes"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("trackio",) * 2])
def test_a_missing_library_is_named_with_its_extra(
    name: str, module: str, small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"tracker={name}: .*; pip install 'wordrun\[{name}\]', or use tracker=jsonl"):
        train(small(f"tracker={name}"), f"hydra.run.dir={tmp_path}/run")


# A tracker that fails in the middle


class Faulty(Tracker):
    """Fails at step 3."""

    calls: ClassVar[list[str]] = []

    def log(self, metrics: dict[str, Any]) -> None:
        self.calls.append("log")
        if metrics["step"] == 3:
            raise ValueError("no more\nof this")

    def state(self) -> dict[str, Any]:
        return {"id": 7}

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        self.calls.append("finish")

    def abandon(self) -> None:
        self.calls.append("abandon")
        raise OSError("this, too")


def test_a_tracker_that_fails_is_named_once_and_the_run_continues(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(parts("tracker"), "faulty", Part(TrackerConfig, f"{__name__}:Faulty"))
    monkeypatch.setattr(Faulty, "calls", [])
    train(small("tracker=faulty"), f"hydra.run.dir={tmp_path}/run", steps=6)
    lines = curves(tmp_path / "run")
    assert [step for step, _ in lines["loss"]] == [1, 2, 3, 4, 5, 6]
    assert Faulty.calls == ["log"] * 3 + ["abandon"]
    (line,) = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "faulty" in line]
    assert re.search(
        r"WARNING tracker=faulty failed \(ValueError: no more, in test_trackers\.py:\d+\): the run continues without "
        r"it; metrics\.jsonl has all metrics$",
        line,
    )
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["trackers"]["faulty"] == {"id": 7}, "a resumed run continues its record"


WITHOUT_SERVICE = """
import os, signal, subprocess, sys
from wordrun import Trainer, compose
from wordrun.train.hooks import Hook

class Kill(Hook):
    def after_step(self, trainer):
        if trainer.step == 2:
            trainer.run.trackers["wandb"].started.result()
            children = ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())]
            lines = subprocess.run(children, capture_output=True, text=True).stdout.splitlines()
            (service,) = [int(line.split()[0]) for line in lines if "wandb-core" in line]
            os.kill(service, signal.SIGKILL)

with Trainer(compose(sys.argv[1:]), hooks=[Kill()]) as trainer:
    trainer.train()
"""


def test_a_run_survives_the_death_of_wandbs_service(small: Words, tmp_path: Path, command: Callable[..., Any]) -> None:
    words = [word for word in small("train.log_interval=1", "train.max_iters=6") if word != "tracker=jsonl"]
    settings = ["tracker=wandb", "tracker.wandb.mode=offline", f"hydra.run.dir={tmp_path}/run"]
    done = command(sys.executable, "-c", WITHOUT_SERVICE, *words, *settings)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count("tracker=wandb failed (") == said.count("wandb failed") == 1
    assert "Traceback" not in said
    assert [step for step, _ in curves(tmp_path / "run")["loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # in tensorboard's thread
def test_a_run_survives_a_full_disk_for_tensorboard(small: Words, tmp_path: Path) -> None:
    place = tmp_path / "run/tensorboard"
    place.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        words = small("tracker=tensorboard", "tracker.tensorboard.flush_s=0", "train.sample_tokens=4")
        train(words, f"hydra.run.dir={tmp_path}/run", steps=100)
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("tracker=tensorboard failed (OSError: [Errno 28] No space left on device, in tensorboard.py:") == 1
    assert len(curves(tmp_path / "run")["loss"]) == 100


# MLflow and Trackio, where they are installed


@pytest.mark.filterwarnings("default")  # about what mlflow calls
def test_mlflow_has_one_run_of_a_resumed_one(small: Words, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic", reason="mlflow-skinny has no databases")
    uri, folder = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    train_and_resume(small("tracker=mlflow", f"tracker.mlflow.uri={uri}", "tracker.mlflow.experiment=shakes"), folder)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("shakes").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["model.n_embd"] == "16"
    expected = curves(folder)
    assert set(run.data.metrics) == set(expected)
    theirs = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
    assert same(expected["loss"], theirs)
    assert len(client.list_artifacts(run.info.run_id, "samples")) == 2


@pytest.mark.filterwarnings("default")
def test_trackio_has_one_run_of_a_resumed_one(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    folder = tmp_path / "run"
    train_and_resume(small("tracker=trackio", "tracker.trackio.project=shakes"), folder)
    (name,) = SQLiteStorage.get_runs("shakes")
    theirs = [(each["step"], each["loss"]) for each in SQLiteStorage.get_logs("shakes", name) if "loss" in each]
    assert same(curves(folder)["loss"], theirs)
    assert "elapsed" in SQLiteStorage.get_logs("shakes", name)[0]
    assert "* Created" not in capfd.readouterr().out
