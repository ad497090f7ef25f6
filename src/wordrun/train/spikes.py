"""Marks spikes of the training loss, scored as OLMo does: in standard deviations above the mean of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.train.hooks.options import SpikesConfig

FLAT = 1e-12
"""Losses with a smaller variance than this, relative to the squared mean, differ only by rounding errors."""


class SpikeDetector:
    """Scores losses, which are the same on all ranks, and counts those whose score is at least the threshold."""

    def __init__(self, options: SpikesConfig | None = None) -> None:
        self.options = options or SpikesConfig()
        self.count = 0
        """Spikes so far."""
        self._window: deque[float] = deque(maxlen=self.options.window)
        """The losses of the last steps."""
        self._squares = deque(self._window, self.options.window)
        """Their squares, kept so that a step takes only microseconds."""
        self._highest: float | None = None
        """The highest score since the last call of ``metrics``."""

    def add(self, losses: Sequence[float], first: int) -> None:
        """Score the ``losses`` of consecutive steps, of which the first is number ``first``; log the highest spike."""
        spikes = []
        for step, loss in enumerate(losses, start=first):
            score = self.score(loss)
            if score is None:
                continue
            self._highest = score if self._highest is None else max(self._highest, score)
            if score >= self.options.threshold:
                spikes.append((score, step, loss))
        if spikes:
            self.count += len(spikes)
            score, step, loss = max(spikes)
            LOGGER.warning(
                "loss spike at step %d: %.4f is %.1f standard deviations above the mean of the %d steps before",
                step,
                loss,
                score,
                self.options.window,
                extra=FIRST_RANK,
            )

    def score(self, loss: float) -> float | None:
        """Return the score of ``loss``, or None if there is none yet, and add it to the window."""
        if not math.isfinite(loss):  # it would make the mean non-finite
            return None
        score, window = None, self._window
        if len(window) == window.maxlen:
            mean = sum(window) / len(window)
            variance = sum(self._squares) / len(window) - mean**2
            if variance > FLAT * mean**2:
                score = (loss - mean) / math.sqrt(variance)
        window.append(loss)
        self._squares.append(loss * loss)
        return score

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics for a line, and begin the next."""
        highest, self._highest = self._highest, None
        return {"spike_score": highest, "spikes": self.count}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, JSON-serializable."""
        return {"losses": list(self._window), "count": self.count, "highest": self._highest}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned, perhaps with other options."""
        self._window = deque(stored["losses"], self.options.window)
        self._squares = deque((loss * loss for loss in self._window), self.options.window)
        self.count, self._highest = stored["count"], stored["highest"]
