"""The run directory: who, with what, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

import wordrun
from wordrun.composer import as_yaml
from wordrun.config import Config
from wordrun.dist import World
from wordrun.errors import ConfigError
from wordrun.log import LOGGER
from wordrun.track import Tracker, build
from wordrun.track.jsonl import finite
from wordrun.track.plots import draw


class Run:
    """What a run leaves behind. On rank 0 it writes; on the others the same calls do nothing."""

    def __init__(self, cfg: Config, world: World, facts: dict[str, Any]) -> None:
        self.path = Path(cfg.run_dir).absolute()
        self.trackers: list[Tracker] = []
        self.record: dict[str, Any] = {}
        if world.rank != 0:
            return
        if not cfg.run_dir:  # else it would be the current directory
            raise ConfigError("the config names no run directory: make it by wordrun.compose(...), or set cfg.run_dir")
        _make_directory(self.path)
        (self.path / "config.yaml").write_text(as_yaml(cfg), encoding="utf-8")
        _adopt_launch_record(self.path)
        _point_latest_at(self.path)
        self.record = {
            "versions": versions(), "git_commit": git_commit(), "start": _now(), "world": asdict(world),
            **facts, "exit_reason": "running",
        }  # fmt: skip
        self._write_record()
        try:
            self.trackers = build(cfg, self.path, facts)
        except Exception as error:
            self.finish({}, f"{type(error).__name__}: {error}")
            raise

    def log(self, metrics: dict[str, Any]) -> None:
        """Hand a line of metrics to the trackers."""
        for tracker in self.trackers:
            tracker.log(metrics)

    def sample(self, step: int, text: str) -> None:
        """Hand a generated text to the trackers."""
        for tracker in self.trackers:
            tracker.sample(step, text)

    def finish(self, summary: dict[str, Any], exit_reason: str) -> list[Path]:
        """Write how the run ended, close the trackers, draw the plots; return the plots' files."""
        if not self.record:
            return []
        self.record |= {**summary, "exit_reason": exit_reason, "end": _now()}
        self._write_record()
        for tracker in self.trackers:
            tracker.finish(summary, exit_status=0 if exit_reason == "finished" else 1)
        return draw(self.path, f"{self.path.parent.name}  {self.path.name}") if self.trackers else []

    def _write_record(self) -> None:
        new = self.path / "run.json.new"
        record = finite(self.record)
        new.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
        new.replace(self.path / "run.json")


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "wordrun": wordrun.__version__, "python": platform.python_version(), "torch": str(torch.__version__),
        "numpy": numpy.__version__, "platform": platform.platform(),
    }  # fmt: skip


def git_commit() -> str | None:
    """Return the commit that this code was checked out from, with ``-dirty`` if it was changed since."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # An installed wheel may lie in an environment inside somebody's repository, which is none of this code's.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, timeout=10, check=True)
        answer = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _make_directory(path: Path) -> None:
    if (path / "run.json").exists():
        raise ConfigError(f"hydra.run.dir={path} holds a run already: choose another directory, or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.json.new").touch()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {path}: {error.strerror}. Choose another by hydra.run.dir=DIR"
        ) from None


def _adopt_launch_record(path: Path) -> None:
    """Move launch.json from where ``launch`` put it into the run directory; ``launch`` follows the link at the end."""
    record = Path(os.environ.get("WORDRUN_LAUNCH_RECORD", ""))
    if not record.is_file() or record.is_symlink():
        return
    try:
        shutil.move(record, path / "launch.json")
        record.symlink_to(path / "launch.json")
    except OSError as error:
        LOGGER.warning("launch.json stays at %s: %s", record, error)


def _point_latest_at(path: Path) -> None:
    """Make outputs/latest a link to the newest run below outputs/."""
    outputs = Path("outputs").absolute()
    if outputs not in path.parents:
        return
    new = outputs / f".latest-{os.getpid()}"
    try:
        new.symlink_to(os.path.relpath(path, outputs))
        new.replace(outputs / "latest")
    except OSError as error:
        LOGGER.warning("cannot point %s at this run: %s", outputs / "latest", error)
