"""metrics.jsonl and samples.txt: plain files that every run has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends each line at once, so that nothing is lost when the run ends badly."""

    def __init__(self, run_dir: Path) -> None:
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
