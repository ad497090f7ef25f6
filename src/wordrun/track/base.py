"""What a tracker is, and which ones a run has."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wordrun.config import Config, part_of


@dataclass(frozen=True)
class Kept:
    """What a continued run brings from its checkpoint."""

    states: dict[str, Any] = field(default_factory=dict)
    """What the trackers' ``state`` returned, all together."""
    seen: int = -1
    """The last step of which the trackers were told, which may be beyond the checkpoint."""


class Tracker(Protocol):
    """Receives what rank 0 reports. Other ranks have none."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Take one line of metrics, with its ``step``; figures that do not apply are None."""
        ...

    def sample(self, step: int, text: str) -> None:
        """Take a generated text."""
        ...

    def rewind(self, step: int, seen: int) -> None:
        """Go on at ``step``, to which the run has gone back; it had come to step ``seen``."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what finds this record again, under the tracker's name, for the checkpoint."""
        ...

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Take the run's summary and close."""
        ...


def build(cfg: Config, run_dir: Path, facts: dict[str, Any], kept: Kept) -> list[Tracker]:
    """Return the trackers of a run that writes to ``run_dir``; only rank 0 calls this.

    Args:
        cfg: the config, which the trackers record.
        run_dir: an existing directory.
        facts: what else describes the run, such as its data source.
        kept: what a continued run brings.
    """
    from wordrun.track.jsonl import JsonlTracker

    trackers: list[Tracker] = [JsonlTracker(run_dir)]
    if cfg.tracker.name != "jsonl":
        trackers.append(part_of("tracker", cfg.tracker).load()(cfg, run_dir, facts, kept))
    return trackers
