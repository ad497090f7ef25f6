"""Where the metrics and samples of a run go."""

from wordrun.track.base import RunInfo, Tracker, build

__all__ = ["RunInfo", "Tracker", "build"]
