"""metrics.jsonl and samples.txt: plain files, which every run has."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wordrun import files
from wordrun.track.base import RunInfo, Tracker


class JsonlTracker(Tracker):
    """Appends each line immediately, so that nothing is lost when the run fails."""

    def __init__(self, options: Any, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        self._open()

    def _open(self) -> None:
        self._metrics = (self.run.path / "metrics.jsonl").open("a", encoding="utf-8")

    def log_lists(self, metrics: dict[str, Any]) -> None:
        """Append one JSON object."""
        self.log(metrics)

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one JSON object; non-finite numbers become null, since JSON has no NaN."""
        try:
            self._metrics.write(json.dumps(finite(metrics)) + "\n")
            self._metrics.flush()
        except OSError as error:
            error.filename = self._metrics.name  # missing from errors of write
            raise

    def sample(self, step: int, text: str) -> None:
        """Append the text below a header with its step."""
        with (self.run.path / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {step} ---\n{text}\n\n")

    def replay(self, lines: Iterable[dict[str, Any]]) -> None:
        """Do nothing: a branch begins with copies of the files."""

    def rewind(self, step: int, logged: int) -> None:
        """Remove what comes after ``step``."""
        self._metrics.close()
        copy_until(self.run.path, self.run.path, step)
        self._open()

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Close the file."""
        self._metrics.close()


def finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return ``metrics`` with None in place of NaN and the infinities, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return list(each_line(run_dir))


def each_line(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl; ``wordrun.runs.metrics`` has them as columns."""
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def between(run_dir: Path, after: int, last: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of numbers of the steps after ``after`` up to ``last``; others may be appended meanwhile."""
    for line in each_line(run_dir):
        if line["step"] > last:
            return
        if line["step"] > after and not any(isinstance(each, list) for each in line.values()):
            yield line


def copy_until(source: Path, target: Path, step: int) -> int:
    """Copy metrics.jsonl and samples.txt up to ``step`` from one run directory to another, which may be the same.

    An incomplete last line, left by a killed run, is dropped.

    Returns:
        The last step in the source.
    """
    lines = []
    last = -1
    if (source / "metrics.jsonl").exists():
        with (source / "metrics.jsonl").open(encoding="utf-8") as file:
            for line in file:
                try:
                    line_step = json.loads(line)["step"]
                except (ValueError, KeyError, TypeError):
                    continue
                last = max(last, line_step)
                if line_step <= step:
                    lines.append(f"{line.rstrip()}\n")
    files.replace(target / "metrics.jsonl", "".join(lines))
    if (source / "samples.txt").exists():
        parts = re.split(r"^(?=--- step \d+ ---\n)", (source / "samples.txt").read_text(encoding="utf-8"), flags=re.M)
        kept = [part for part in parts if (match := re.match(r"--- step (\d+) ---", part)) and int(match[1]) <= step]
        files.replace(target / "samples.txt", "".join(kept))
    return last


def forget_steps(log: Path, step: int) -> None:
    """Remove the lines of steps after ``step`` from the file ``log``, if it exists, and keep all other lines."""
    if log.exists():
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        later = (re.search(r"\] INFO step (\d+)/", line) for line in lines)
        kept = (line for line, match in zip(lines, later, strict=True) if not match or int(match[1]) <= step)
        files.replace(log, "".join(kept))
