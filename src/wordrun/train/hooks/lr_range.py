"""Learning-rate range test (Smith 2017): raises the learning rate until the loss diverges, and suggests one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from wordrun.common.log import LOGGER
from wordrun.dist.collectives import all_mean
from wordrun.track.plots import draw_lr_range
from wordrun.train.hints import relative
from wordrun.train.hooks.base import Hook, Training
from wordrun.train.hooks.options import LRRangeConfig

DIVERGED = 4.0
"""The test ends at a loss of this many times the lowest."""
RECENT = 5
"""Number of recent losses whose mean shows divergence; also the half-width of the smoothing window, in steps."""


class LRRange(Hook):
    """Sets the learning rate, notes the losses, and ends the run with plots/lr_range.png and lr_range.json."""

    expects_divergence = True

    def __init__(self, options: LRRangeConfig) -> None:
        self.options = options
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._lowest = math.inf

    def learning_rate(self, trainer: Training, scheduled: float) -> float:
        """Return the next rate of a geometric sequence."""
        options = self.options
        done = len(self.losses) / (options.steps - 1)
        return float(options.lowest * (options.highest / options.lowest) ** done)

    def after_step(self, trainer: Training) -> None:
        """Note the loss over all ranks."""
        self.rates.append(self.learning_rate(trainer, 0.0))
        self.losses.append(all_mean(trainer.result.loss).item())
        self._lowest = min(self._lowest, self._recent())

    def _recent(self) -> float:
        recent = self.losses[-RECENT:]
        return sum(recent) / len(recent)

    def stop_reason(self) -> str:
        """Return why the test ends: the loss has diverged, or all learning rates have been tried."""
        if not self.losses:
            return ""
        if not math.isfinite(self.losses[-1]) or self._recent() > DIVERGED * self._lowest:
            return f"learning-rate range test: the loss diverged at {self.rates[-1]:.1e}"
        return "learning-rate range test: complete" if len(self.losses) >= self.options.steps else ""

    def at_end(self, trainer: Training) -> None:
        """Write the result."""
        if trainer.world.rank != 0 or not self.losses:
            return
        smoothed = centered(self.losses)
        found = steepest(self.rates, smoothed)
        folder = trainer.run.path / "plots"
        folder.mkdir(exist_ok=True)
        draw_lr_range(folder / "lr_range.png", self.rates, self.losses, smoothed, found)
        losses: list[float | None] = [loss if math.isfinite(loss) else None for loss in self.losses]  # JSON has no NaN
        text = json.dumps({"suggestion": found, "lr": self.rates, "loss": losses})
        (trainer.run.path / "lr_range.json").write_text(f"{text}\n", encoding="utf-8")
        if found is None:
            LOGGER.warning("the test found no learning rate: change hooks.lr_range.lowest, highest or steps")
        else:
            LOGGER.info("the loss falls fastest at this learning rate: optimizer.learning_rate=%.1e", found)
        LOGGER.info("plot: %s", relative(folder / "lr_range.png"))


def centered(losses: Sequence[float]) -> list[float]:
    """Return the mean of each loss and its neighbors on both sides, which does not lag behind."""
    means = []
    for i in range(len(losses)):
        reach = min(RECENT, i, len(losses) - 1 - i)
        near = losses[i - reach : i + reach + 1]
        means.append(sum(near) / len(near))
    return means


def steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which ``losses`` fall fastest over the logarithm of ``rates``; None if they never fall."""
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    end = finite.index(min(finite))  # after it, the loss may fall again while it diverges
    slopes = [(finite[i + 1] - finite[i - 1], rates[i]) for i in range(RECENT, end)]
    slope, rate = min(slopes, default=(0.0, 0.0))
    return rate if slope < 0 else None
