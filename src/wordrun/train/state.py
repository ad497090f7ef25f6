"""The state of a run, besides the model and the optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wordrun.train.hooks.options import SpikesConfig
from wordrun.train.spikes import SpikeDetector

STORED = (
    "step",
    "position",
    "best_loss",
    "best_metric",
    "best_value",
    "best_step",
    "evaluated_step",
    "skipped",
    "compiled",
)
"""Fields that a checkpoint stores as they are."""


def improves(value: float, best: float | None, by: float = 0.0, *, higher: bool | None = False) -> bool:
    """Return whether ``value`` is better than ``best`` (None: there is none yet) by more than ``by``; NaN never is."""
    sign = 1 if higher else -1
    return sign * value > (-math.inf if best is None else sign * best + by)


@dataclass
class TrainState:
    """The state of a run, which other objects change only through its methods, except ``rng``.

    Checkpoints store it with ``state_dict``, and the RNG states as one tensor per rank.
    """

    step: int = 0
    """Optimizer steps, excluding steps that were skipped or undone by a rollback."""
    position: int = 0
    """Examples taken from the data by all ranks together, in order: the index of the next step's first example."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The latest value of each metric."""
    best_loss: float | None = None
    """The lowest validation loss so far."""
    best_metric: str = "val_loss"
    """The metric by which checkpoints are compared."""
    best_value: float | None = None
    """The best value of ``best_metric`` so far."""
    best_step: int = -1
    """The step at which that was measured."""
    evaluated_step: int = -1
    """The step of the last evaluation."""
    skipped: int = 0
    """Consecutive steps skipped because of non-finite gradients (train.on_nonfinite=skip)."""
    compiled: bool | None = None
    """What train.compile=auto has decided; None: nothing yet."""
    rollbacks: dict[int, int] = field(default_factory=dict)
    """Rollbacks so far, by the step of the checkpoint (train.on_nonfinite=rollback)."""
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    """Scores the training losses."""
    seconds: float = 0.0
    """Training time until the clock was last started; ``elapsed`` includes the time since then."""
    rng: dict[str, Any] = field(default_factory=dict, repr=False)
    """RNG states of this process while the run does not use them; ``rng.swapped`` exchanges them."""
    _started: float | None = field(default=None, repr=False)

    def take(self, examples: int) -> None:
        """Count ``examples`` as taken from the data, whether or not the step counts."""
        self.position += examples

    def count_step(self) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.skipped = 0

    def skip_step(self) -> None:
        """Count a step that was skipped because of non-finite gradients."""
        self.skipped += 1

    def record_evaluation(
        self, values: Mapping[str, float], metric: str = "val_loss", *, higher: bool | None = False
    ) -> None:
        """Record what an evaluation of this step has measured.

        Args:
            values: by name; val_loss at least.
            metric: the one by which checkpoints are compared.
            higher: whether higher values of it are better.
        """
        self.evaluated_step = self.step
        self.metrics.update(values)
        if metric != self.best_metric:
            self.best_metric, self.best_value, self.best_step = metric, None, -1
        if improves(values["val_loss"], self.best_loss):
            self.best_loss = values["val_loss"]
        if improves(values[metric], self.best_value, higher=higher):
            self.best_value, self.best_step = values[metric], self.step

    def record_metrics(self, values: Mapping[str, Any]) -> None:
        """Keep ``values`` as the latest of their names."""
        self.metrics.update(values)

    def mark_spikes(self, options: SpikesConfig) -> None:
        """Mark spikes of the training loss by these ``options`` from now on."""
        self.spikes = SpikeDetector(options)

    def remember_compilation(self, compiled: bool) -> None:
        """Keep what train.compile=auto has decided."""
        self.compiled = compiled

    def start_clock(self) -> None:
        """Count the time from now on as training time."""
        self._started = time.monotonic()

    def stop_clock(self) -> None:
        """Stop counting time."""
        self.seconds, self._started = self.elapsed(), None

    def elapsed(self) -> float:
        """Return the training time in seconds, including earlier parts of the run."""
        return self.seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint's manifest, JSON-serializable."""
        return {
            **{name: getattr(self, name) for name in STORED},
            "rollbacks": self.rollbacks,
            "seconds": self.elapsed(),
            "spikes": self.spikes.state_dict(),
            "metrics": {name: value for name, value in self.metrics.items() if name == "loss" or name[:4] == "val_"},
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
        self.metrics = dict(stored["metrics"])
        for name in STORED:
            setattr(self, name, stored[name])
        self.rollbacks = {int(step): count for step, count in stored["rollbacks"].items()}
        self.spikes.load_state_dict(stored["spikes"])
        self.seconds = stored["seconds"]

    def roll_back(self, stored: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, except for position, training time and the model's compilation."""
        position, seconds, rollbacks, compiled = self.position, self.seconds, self.rollbacks, self.compiled
        self.load_state_dict(stored)
        self.position, self.seconds, self.compiled = position, seconds, compiled
        self.rollbacks = {**rollbacks, self.step: rollbacks.get(self.step, 0) + 1}
