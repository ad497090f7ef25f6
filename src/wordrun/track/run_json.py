"""What a run directory says about its run: options, versions, launches, and state."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.files import DIED, in_use, no_run_yet, read_json, why
from wordrun.track.metrics_jsonl import evaluations

RECORD = "run.json"
METRICS = "metrics.jsonl"
NO_REASON = ("", "running", DIED)
"""What run.json says of a run that could not record why it ended."""
PART = {
    "start": str,
    "end": str,
    "exit_reason": str,
    "steps": int,
    "seconds": (int, float),
    "backend": str,
    "world": {"hosts": [str], "size": int, "nodes": int},
    "resumed_from": {"step": int, "named": str, "memory": str},
}
"""The types of what run.json says of each part of a run."""
KINDS: dict[str, Any] = {
    **PART,
    "earlier": [PART],
    "recoveries": [{"time": (int, float)}],
    "versions": {},
    "data": {},
}
"""The types of what run.json says of the run; what it says besides is only shown."""
LAUNCH = {
    "launch": [str],
    "command": [str],
    "launcher": str,
    "launcher_path": str,
    "scheduler": str,
    "job": str,
    "site": str,
}
"""The same for launch.json."""
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
        return list(self.facts.get("world", {}).get("hosts", []))

    @property
    def written(self) -> float:
        """When it last wrote to its metrics, log or record, in seconds since the epoch."""
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
        if reason not in ("running", ""):
            return "stopped" if reason.startswith("stopped") else "failed"
        if in_use(self.path):
            return "running"
        if not reason:  # run.json is missing or broken
            return "unknown"
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
    if not has_run(path):
        what = (
            "contains no run: neither run.json, metrics.jsonl nor a checkpoint" if path.is_dir() else "does not exist"
        )
        raise ConfigError(f"{path} {what}; wordrun ls shows the runs below outputs/")
    earlier = sorted(path.glob("launch-*.json"), key=lambda file: int("0" + "".join(filter(str.isdecimal, file.stem))))
    found = (read_json(file) for file in (*earlier, path / "launch.json"))
    return RunRecord(path, read(path), [typed(content, LAUNCH) for content in found if content])


def read(run_dir: Path) -> dict[str, Any]:
    """Return run.json without values of a wrong type; empty if it is missing or cannot be read."""
    return typed(read_json(run_dir / RECORD), KINDS)


def typed(content: object, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object ``content`` without the values that are not of these ``kinds``: files may contain anything.

    Args:
        content: what was in a file; empty is returned if it is no object.
        kinds: types by name; a list of one for lists, a mapping for objects. Other names may have any value.
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


def has_run(path: Path) -> bool:
    """Return whether the folder ``path`` has a run: a checkpoint, its record or its metrics, readable or not."""
    metrics = path / METRICS
    return (
        os.path.lexists(path / RECORD)
        or any((path / "checkpoints").glob("step-*"))
        or (os.path.isfile(metrics) and os.path.getsize(metrics) > 0)
    )


def gone(run_dir: Path) -> str:
    """Return a message if the directory of the present run was removed or cannot be reached; empty: it is there."""
    reason = ""
    for name in (".lock", RECORD, METRICS):  # a user may remove one of them
        try:
            os.lstat(run_dir / name)
            return ""
        except OSError as error:
            reason = why(error)
    return f"the directory {run_dir} of this run was removed, moved or cut off ({reason}): the run ends"


def find(folder: Path) -> Iterator[Path]:
    """Yield the run directories at or below ``folder``; links are not followed."""
    for root, folders, names in os.walk(folder):
        if {RECORD, METRICS, "checkpoints"} & {*names, *folders} and has_run(Path(root)):
            folders.clear()
            yield Path(root)
        folders.sort()


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None
