"""What a run directory says about its run: options, versions, launches, and state."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wordrun.errors import ConfigError
from wordrun.files import DIED, in_use, no_run_yet
from wordrun.runs.metrics import evaluations

RECORD = "run.json"
NO_REASON = ("", "running", DIED)
"""What run.json says of a run that could not record why it ended."""
QUIET_S = 600
"""A run on another machine that has written nothing for this time [s] is shown as silent."""


@dataclass(frozen=True)
class RunRecord:
    """A run's directory and the records in it. What is missing or cannot be read is empty."""

    path: Path
    facts: dict[str, Any]
    """Contents of run.json."""
    launches: list[dict[str, Any]] = field(default_factory=list)
    """The records of ``launch``, oldest first."""

    @property
    def hosts(self) -> list[str]:
        """The hosts of its ranks."""
        return list((self.facts.get("world") or {}).get("hosts") or [])

    @property
    def written(self) -> float:
        """When it last wrote to its metrics, log or record, in seconds since the epoch."""
        names = (RECORD, "metrics.jsonl", "log.txt")
        return max((stat.st_mtime for name in names if (stat := _stat(self.path / name))), default=0.0)

    @property
    def best_metric(self) -> str:
        """The run's train.best_metric, by which its evaluations are compared."""
        return str(self.facts.get("best_metric") or "val_loss")

    @property
    def higher_is_better(self) -> bool:
        """Whether higher values of ``best_metric`` are better."""
        return self.facts.get("best_mode") == "max"

    def best_value(self) -> float | None:
        """Return the best value of ``best_metric`` so far, while the run is running from metrics.jsonl; None: none."""
        recorded = self.facts.get("best_value")
        if isinstance(recorded, int | float) or "end" in self.facts:
            return recorded
        values = [value for _, value in evaluations(self.path, self.best_metric)]
        return (max if self.higher_is_better else min)(values, default=None)

    def state(self) -> str:
        """Return the state of the run: running, finished, stopped, failed, died, or silent.

        died: ``launch`` has found that no process of it is left that could say why; or its record says running, and no
        process on this machine, where it ran, holds its directory.
        silent: the same on another machine, where nothing was written for a while.
        """
        reason = str(self.facts.get("exit_reason", ""))
        if reason in ("finished", DIED):
            return reason
        if reason != "running":
            return "stopped" if reason.startswith("stopped") else "failed" if reason else "unknown"
        if in_use(self.path):
            return "running"
        if self.hosts == [socket.gethostname()]:
            return DIED
        return "silent" if time.time() - self.written > QUIET_S else "running"


def load(path: Path) -> RunRecord:
    """Return the records in the run directory ``path``, or in the directory of its link.

    Raises:
        ConfigError: ``path`` is not a run directory.
    """
    if nothing := no_run_yet(path):
        raise ConfigError(nothing)
    path = Path(os.path.realpath(path))
    if not path.is_dir() or not ((path / RECORD).exists() or (path / "metrics.jsonl").exists()):
        what = "contains no run: neither run.json nor metrics.jsonl" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}; wordrun ls shows the runs below outputs/")
    earlier = sorted(path.glob("launch-*.json"), key=lambda file: int("0" + "".join(filter(str.isdigit, file.stem))))
    launches = [content for file in (*earlier, path / "launch.json") if (content := read_json(file))]
    return RunRecord(path, read_json(path / RECORD), launches)


def find(folder: Path) -> Iterator[Path]:
    """Yield the run directories at or below ``folder``; links are not followed."""
    for root, folders, names in os.walk(folder):
        if RECORD in names:
            folders.clear()
            yield Path(root)
        folders.sort()


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in ``file``; empty if there is none that can be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None
