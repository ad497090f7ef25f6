"""metrics.jsonl and samples.txt: plain files that every run has."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from wordrun import files


class JsonlTracker:
    """Appends each line at once, so that nothing is lost when the run ends badly."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = run_dir / "samples.txt"

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one JSON object; a figure that is not finite becomes null, as JSON has no NaN."""
        try:
            self._metrics.write(json.dumps(finite(metrics)) + "\n")
            self._metrics.flush()
        except OSError as error:
            error.filename = self._metrics.name  # a write does not say where it failed
            raise

    def sample(self, step: int, text: str) -> None:
        """Append the text under a headline with its step."""
        with self._samples.open("a", encoding="utf-8") as file:
            file.write(f"--- step {step} ---\n{text}\n\n")

    def rewind(self, step: int, seen: int) -> None:
        """Leave out what comes after ``step``."""
        self._metrics.close()
        copy_until(self._run_dir, self._run_dir, step)
        self._metrics = (self._run_dir / "metrics.jsonl").open("a", encoding="utf-8")

    def state(self) -> dict[str, Any]:
        """Return nothing: the files are found by their names."""
        return {}

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Close the file."""
        self._metrics.close()


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Return ``figures`` with None for what JSON cannot hold: NaN and the infinities."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def copy_until(source: Path, target: Path, step: int) -> int:
    """Copy metrics.jsonl and samples.txt up to ``step`` from one run directory to another, which may be the same.

    A last line that a killed run has left half written goes, too.

    Returns:
        The last step that was there.
    """
    lines = []
    seen = -1
    if (source / "metrics.jsonl").exists():
        for line in (source / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            try:
                at = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue
            seen = max(seen, at)
            if at <= step:
                lines.append(f"{line}\n")
    files.replace(target / "metrics.jsonl", "".join(lines))
    if (source / "samples.txt").exists():
        parts = re.split(r"^(?=--- step \d+ ---\n)", (source / "samples.txt").read_text(encoding="utf-8"), flags=re.M)
        kept = [part for part in parts if (match := re.match(r"--- step (\d+) ---", part)) and int(match[1]) <= step]
        files.replace(target / "samples.txt", "".join(kept))
    return seen


def forget_steps(log: Path, step: int) -> None:
    """Take the lines of steps after ``step`` out of the file ``log``, if there is one; what else happened stays."""
    if log.exists():
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        later = (re.search(r"\] INFO step (\d+)/", line) for line in lines)
        kept = (line for line, match in zip(lines, later, strict=True) if not match or int(match[1]) <= step)
        files.replace(log, "".join(kept))
