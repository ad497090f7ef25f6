"""Where metrics, samples and the config of a run go."""

from wordrun.track.base import Tracker, build

__all__ = ["Tracker", "build"]
