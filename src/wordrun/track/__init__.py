"""Trackers record the metrics and samples of a run."""

from typing import TYPE_CHECKING

from wordrun.common.lazy import offers

if TYPE_CHECKING:
    from wordrun.track.base import LEGEND as LEGEND, RunInfo as RunInfo, Tracker as Tracker, build as build

__getattr__ = offers(__name__, {"wordrun.track.base": "LEGEND RunInfo Tracker build"})
