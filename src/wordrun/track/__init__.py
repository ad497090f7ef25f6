"""Trackers record the metrics and samples of a run."""

from typing import TYPE_CHECKING, Any

from wordrun.common.lazy import attribute

if TYPE_CHECKING:
    from wordrun.track.base import LEGEND as LEGEND, RunInfo as RunInfo, Tracker as Tracker, build as build

__all__ = ["LEGEND", "RunInfo", "Tracker", "build"]


def __getattr__(name: str) -> Any:
    return attribute(
        __name__,
        name,
        {
            "LEGEND": "wordrun.track.base",
            "RunInfo": "wordrun.track.base",
            "Tracker": "wordrun.track.base",
            "build": "wordrun.track.base",
        },
    )
