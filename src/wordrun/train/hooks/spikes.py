"""Scores spikes of the training loss, as OLMo does: in standard deviations above the mean of the preceding steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import torch
from torch import Tensor

from wordrun.config import SpikesConfig
from wordrun.dist.collectives import all_mean
from wordrun.log import FIRST_RANK, LOGGER
from wordrun.train.training import Hook, Training, due


class Spikes(Hook):
    """Adds spike_score, the highest score since the previous line of metrics, and spikes, the number of spikes so far.

    Losses stay on the device until a line of metrics is due, so that other steps do not wait for the device.
    """

    def __init__(self, options: SpikesConfig) -> None:
        self.options = options
        self.window: deque[float] = deque(maxlen=options.window)
        """The losses of the last steps, means over all ranks."""
        self.spikes = 0
        self.highest: float | None = None
        """The highest score since the last line of metrics."""
        self._pending: list[Tensor] = []
        self._step = 0

    def after_step(self, trainer: Training) -> None:
        """Note the loss; with a line of metrics, add the scores to it."""
        train = trainer.cfg.train
        self._pending.append(trainer.result.loss)
        self._step = trainer.step
        if due(self._step, train.log_interval) or self._step == train.max_iters:
            self._score()
            trainer.log_metrics({"spike_score": self.highest, "spikes": self.spikes})
            self.highest = None

    def _score(self) -> None:
        """Score the losses of the steps since the last call; every rank must call this."""
        if not self._pending:
            return
        losses = all_mean(torch.stack(self._pending)).tolist()
        first = self._step - len(losses) + 1
        self._pending = []
        for step, loss in enumerate(losses, start=first):
            score = self._add(loss)
            if score is None:
                continue
            self.highest = score if self.highest is None else max(self.highest, score)
            if score >= self.options.threshold:
                self.spikes += 1
                LOGGER.warning(
                    "loss spike at step %d: %.4f is %.1f standard deviations above the mean of %d steps (hooks.spikes)",
                    step, loss, score, len(self.window), extra=FIRST_RANK,
                )  # fmt: skip

    def _add(self, loss: float) -> float | None:
        """Return the score of ``loss``, or None if there is none yet, and add it to the window."""
        if not math.isfinite(loss):  # it would leave no mean to compare with
            return None
        score = None
        if len(self.window) == self.options.window and (deviation := statistics.pstdev(self.window)) > 0:
            score = (loss - statistics.fmean(self.window)) / deviation
        self.window.append(loss)
        return score

    def state(self) -> dict[str, Any]:
        """Return the losses in the window and what has been counted."""
        self._score()
        return {"losses": list(self.window), "spikes": self.spikes, "highest": self.highest}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the losses and the counts."""
        self._pending = []
        self.window = deque(state["losses"], maxlen=self.options.window)
        self.spikes, self.highest = state["spikes"], state["highest"]
