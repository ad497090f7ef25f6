"""Trackers record the metrics and samples of a run."""

from wordrun.track.base import RunInfo, Tracker, build

__all__ = ["RunInfo", "Tracker", "build"]
