"""What a tracker is, and which ones a run has."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from wordrun.config import Config

TABLE = {"wandb": "wordrun.track.wandb:WandbTracker"}
"""Name, as in tracker=NAME, to module and class; jsonl needs none, because every run has it."""


class Tracker(Protocol):
    """Receives what rank 0 reports. Other ranks have none."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Take one line of metrics, with its ``step``; figures that do not apply are None."""
        ...

    def sample(self, step: int, text: str) -> None:
        """Take a generated text."""
        ...

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Take the run's summary and close."""
        ...


def build(cfg: Config, run_dir: Path, facts: dict[str, Any]) -> list[Tracker]:
    """Return the trackers of a run that writes to ``run_dir``; only rank 0 calls this.

    Args:
        cfg: the config, which the trackers record.
        run_dir: an existing directory.
        facts: what else describes the run, such as its data source.
    """
    from wordrun.track.jsonl import JsonlTracker

    trackers: list[Tracker] = [JsonlTracker(run_dir)]
    if cfg.tracker.name in TABLE:
        module, _, name = TABLE[cfg.tracker.name].partition(":")
        trackers.append(getattr(importlib.import_module(module), name)(cfg, run_dir, facts))
    return trackers
