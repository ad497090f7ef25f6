"""What a run directory says about its run: versions, launches, and whether it runs, has ended, died or is silent."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.files import read_json
from wordrun.common.run_dir import DIED, METRICS, RECORD, has_run, in_use, no_run_yet
from wordrun.track.metrics_jsonl import evaluations

START_TYPES = {
    "start": str,
    "end": str,
    "exit_reason": str,
    "steps": int,
    "seconds": (int, float),
    "backend": str,
    "world": {"hosts": [str], "size": int, "nodes": int},
    "resumed_from": {"step": int, "named": str, "memory": str},
}
"""The types of what run.json says about each start of a run."""
TYPES: dict[str, Any] = {
    **START_TYPES,
    "earlier": [START_TYPES],
    "recoveries": [{"time": (int, float)}],
    "versions": {},
    "data": {},
}
"""The types of what run.json says about the run as a whole; other entries may have any type, and are only shown."""
LAUNCH_TYPES = {
    "launch": [str],
    "command": [str],
    "launcher": str,
    "launcher_path": str,
    "scheduler": str,
    "job": str,
    "site": str,
}
"""The types of what launch.json says."""


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
        return list(self.facts.get("world", {}).get("hosts", []))

    @property
    def written(self) -> float:
        """When the run last wrote to its metrics, log or record, in seconds since the epoch."""
        names = (RECORD, METRICS, "log.txt")
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
        """Return the best value of ``best_metric`` so far; None: there is none. A running run's is in metrics.jsonl."""
        recorded = self.facts.get("best_value")
        if isinstance(recorded, int | float) or "end" in self.facts:
            return recorded
        values = [value for _, value in evaluations(self.path, self.best_metric)]
        return (max if self.higher_is_better else min)(values, default=None)


def load(path: Path) -> RunRecord:
    """Return the records in the run directory ``path``, which may be a link to one.

    Raises:
        ConfigError: ``path`` is not a run directory.
    """
    if nothing := no_run_yet(path):
        raise ConfigError(nothing)
    path = Path(os.path.realpath(path))
    if not has_run(path):
        what = (
            "contains no run: neither run.json, metrics.jsonl nor a checkpoint" if path.is_dir() else "does not exist"
        )
        raise ConfigError(f"{path} {what}; wordrun ls shows the runs below outputs/")
    earlier = sorted(path.glob("launch-*.json"), key=lambda file: int("0" + "".join(filter(str.isdecimal, file.stem))))
    found = (read_json(file) for file in (*earlier, path / "launch.json"))
    return RunRecord(path, read(path), [typed(content, LAUNCH_TYPES) for content in found if content])


def read(run_dir: Path) -> dict[str, Any]:
    """Return run.json without values of a wrong type; empty if it is missing or cannot be read."""
    return typed(read_json(run_dir / RECORD), TYPES)


def typed(content: object, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` without values of types other than those in ``kinds``: files may contain anything.

    Args:
        content: the JSON value in a file; of anything but an object, nothing is left.
        kinds: types by name: [T] for lists of T, a mapping for objects. Other names may have any value.
    """
    if not isinstance(content, dict):
        return {}
    found: dict[str, Any] = {}
    for name, value in content.items():
        kind = kinds.get(name, object)
        if isinstance(kind, list) and isinstance(value, list):
            if isinstance(kind[0], dict):
                found[name] = [typed(each, kind[0]) for each in value if isinstance(each, dict)]
            elif all(isinstance(each, kind[0]) for each in value):
                found[name] = value
        elif isinstance(kind, dict) and isinstance(value, dict):
            found[name] = typed(value, kind)
        elif isinstance(kind, type | tuple) and isinstance(value, kind):
            found[name] = value
    return found


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


NO_REASON = ("", "running", DIED)
"""``exit_reason`` in run.json of a run that could not record why it ended."""
QUIET_S = 600
"""A run on another machine that has written nothing for this time [s] is silent."""


def state_of(run: RunRecord) -> str:
    """Return the state of a run: running, finished, stopped, failed, died, silent, or unknown.

    - died: ``launch`` recorded that none of its processes is left and that none said why it ended; or run.json still
      says "running", but the run was on this machine alone, and no process holds its directory.
    - silent: run.json says "running", the run is on other machines, and it has written nothing for ``QUIET_S``.
    - unknown: run.json is missing or cannot be read, and no process on this machine holds the directory.
    """
    reason = str(run.facts.get("exit_reason", ""))
    if reason in ("finished", DIED):
        return reason
    if reason not in ("running", ""):
        return "stopped" if reason.startswith("stopped") else "failed"
    if in_use(run.path):
        return "running"
    if not reason:
        return "unknown"
    if run.hosts == [socket.gethostname()]:
        return DIED
    return "silent" if time.time() - run.written > QUIET_S else "running"
