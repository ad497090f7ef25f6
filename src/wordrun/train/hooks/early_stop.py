"""Ends a run that no longer improves."""

from __future__ import annotations

from typing import Any

from wordrun.common.validation import higher_is_better
from wordrun.train.hooks.base import Hook, Training
from wordrun.train.hooks.options import EarlyStopConfig
from wordrun.train.state import improves


class EarlyStop(Hook):
    """Counts the evaluations since the metric last improved by more than ``min_delta``."""

    def __init__(self, options: EarlyStopConfig) -> None:
        self.options = options
        self.best: float | None = None
        self.waited = 0

    def after_step(self, trainer: Training) -> None:
        """Compare, if this step was evaluated."""
        if trainer.state.evaluated_step != trainer.step:
            return
        options, value = self.options, trainer.metrics[self.options.metric]
        higher = higher_is_better(options.metric, options.mode)
        if improves(value, self.best, options.min_delta, higher=higher):
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def stop_reason(self) -> str:
        """Return why the run should end, if the patience is exhausted."""
        if self.waited < self.options.patience:
            return ""
        return f"stopped early: {self.waited} evaluations without an improvement (hooks.early_stop.patience)"

    def state(self) -> dict[str, Any]:
        """Return the best value and the evaluations since."""
        return {"metric": self.options.metric, "best": self.best, "waited": self.waited}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the best value and the count, unless they are of another metric."""
        if state.get("metric", "val_loss") == self.options.metric:
            self.best, self.waited = state["best"], state["waited"]
