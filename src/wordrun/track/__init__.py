"""Where metrics, samples and the config of a run go."""

from wordrun.track.base import Kept, Tracker, build

__all__ = ["Kept", "Tracker", "build"]
