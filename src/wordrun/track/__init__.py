"""Trackers record the metrics and samples of a run."""

from wordrun.track.base import LEGEND, RunInfo, Tracker, build

__all__ = ["LEGEND", "RunInfo", "Tracker", "build"]
