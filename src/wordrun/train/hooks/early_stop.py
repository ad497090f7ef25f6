"""Ends a run whose validation loss no longer improves."""

from __future__ import annotations

import math
from typing import Any

from wordrun.config import EarlyStopConfig
from wordrun.train.training import Hook, Training


class EarlyStop(Hook):
    """Counts the evaluations since the validation loss last improved by more than ``min_delta``."""

    def __init__(self, options: EarlyStopConfig) -> None:
        self.options = options
        self.best: float | None = None
        self.waited = 0

    def after_step(self, trainer: Training) -> None:
        """Compare, if this step was evaluated."""
        if trainer.state.evaluated_step != trainer.step:
            return
        loss = trainer.metrics["val_loss"]
        if loss < (math.inf if self.best is None else self.best - self.options.min_delta):  # never true for NaN
            self.best, self.waited = loss, 0
        else:
            self.waited += 1

    def stop_reason(self) -> str:
        """Return why the run should end, if the patience is exhausted."""
        if self.waited < self.options.patience:
            return ""
        return f"stopped early: {self.waited} evaluations without an improvement (hooks.early_stop.patience)"

    def state(self) -> dict[str, Any]:
        """Return the best loss and the evaluations since."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the best loss and the count."""
        self.best, self.waited = state["best"], state["waited"]
