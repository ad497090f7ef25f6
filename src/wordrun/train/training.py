"""The interfaces between the parts of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from wordrun.backend import Backend
from wordrun.config import Config
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.log import LogHandle
from wordrun.train.checkpoint import Checkpoints
from wordrun.train.metrics import Meter
from wordrun.train.run import Run
from wordrun.train.state import TrainState


class Task(Protocol):
    """What checkpoints need from a task."""

    unit: str
    """What the examples are called."""

    def fixed(self) -> dict[str, Any]:
        """Return what a resumed run must share with its checkpoint, besides options; keys are for people to read."""

    def manifest(self, position: int) -> dict[str, Any]:
        """Return the task's entries for a checkpoint's manifest after ``position`` examples."""


class Training(Protocol):
    """The part of the trainer that hooks, resuming and the handling of non-finite gradients use.

    Methods are collective: every rank must call them.
    """

    cfg: Config
    world: World
    layout: Layout
    gas: int
    """Micro-steps of each optimizer step."""
    task: Task
    backend: Backend
    state: TrainState
    run: Run
    log: LogHandle
    meter: Meter
    checkpoints: Checkpoints
    hooks: Sequence[Hook]
    """All hooks, in the order in which they are called."""

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.state.step

    @property
    def metrics(self) -> dict[str, Any]:
        """The latest value of each metric."""
        return self.state.metrics

    @property
    def examples_per_step(self) -> int:
        """Examples in one optimizer step over all ranks: the global batch size."""
        return self.cfg.model.batch_size * self.layout.dp * self.gas

    @property
    def stop_reason(self) -> str:
        """Why a hook wants the run to end before train.max_iters; empty: none does."""
        return next((reason for hook in self.hooks if (reason := hook.stop_reason())), "")

    @property
    def done(self) -> bool:
        """Whether the run has taken its last step."""
        return self.step >= self.cfg.train.max_iters or bool(self.stop_reason)

    def evaluate(self) -> float:
        """Return the mean loss over the fixed validation set."""

    def measure(self) -> dict[str, float]:
        """Return the means over the fixed validation set, of the loss as val_loss and of each metric as val_NAME."""

    def generate(self) -> str:
        """Return a sample."""

    def save(self, *, best: bool = False) -> None:
        """Save a checkpoint of the current state."""


def due(step: int, interval: int) -> bool:
    """Return whether ``step`` is a multiple of ``interval``; an interval of 0 is never due."""
    return interval > 0 and step % interval == 0


class Hook:
    """Base class of hooks, called between steps on every rank; each hook decides whether it is due."""

    def at_start(self, trainer: Training) -> None:
        """Called before the first step."""

    def after_step(self, trainer: Training) -> None:
        """Called after each step that counts; ``trainer.state.step`` includes it."""

    def at_end(self, trainer: Training) -> None:
        """Called after the last step, unless the run was interrupted."""

    def close(self) -> None:
        """Called however the run ended."""

    def stop_reason(self) -> str:
        """Return why the run should end after this step, the same on all ranks; empty: it should not."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state, JSON-serialisable; checkpoints store it under the name of its class."""
        return {}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
