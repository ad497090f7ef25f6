"""Hugging Face's Trackio: a database on this machine, or a Space."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from wordrun.common.log import LOGGER
from wordrun.track.base import AppendOnlyTracker, RunInfo, missing
from wordrun.track.options import TrackioConfig

RENAMED = {"time": "elapsed"}
"""Metrics with names that trackio reserves."""


class TrackioTracker(AppendOnlyTracker):
    """One Trackio run; a thread of trackio's stores the metrics."""

    def __init__(self, options: TrackioConfig, run: RunInfo, state: dict[str, Any]) -> None:
        super().__init__(options, run, state)
        try:
            import trackio
        except ImportError as error:
            raise missing("trackio", error) from None
        self._trackio = trackio
        with _silent():
            self._run = trackio.init(
                options.project,
                run.path.name,
                space_id=options.space_id,
                config=run.flat(),
                embed=False,
                resume="allow" if state else "never",
            )

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Pass a line of metrics to trackio's thread."""
        self._run.log({RENAMED.get(name, name): value for name, value in metrics.items() if name != "step"}, step)

    def state(self) -> dict[str, Any]:
        """Return a mark that the run exists; trackio finds it by its name."""
        return {"name": self._run.name}

    def finish(self, summary: dict[str, Any], exit_status: int) -> None:
        """Store what is pending, and log how to see it."""
        with _silent():
            self._trackio.finish()
        if self.options.space_id is None:
            LOGGER.info("Trackio: trackio show --project %s", self.options.project)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide what trackio prints, which would disturb the progress bar."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
