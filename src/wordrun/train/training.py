"""What the parts of a training run see of each other."""

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
    """What a run learns: its examples, what they cost, and the facts that describe them."""

    tokens_per_example: int
    flops_per_example: int
    """Floating-point operations of an example's forward and backward pass."""

    def hooks(self) -> Sequence[Hook]:
        """Return hooks that every run of this task has."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what run.json says of the data and the model."""
        ...

    def fixed(self) -> dict[str, Any]:
        """Return what a resumed run must share with its checkpoint, besides options; keys are for people to read."""
        ...

    def manifest(self, position: int) -> dict[str, Any]:
        """Return what a checkpoint's manifest says of the task after ``position`` examples."""
        ...


class Training(Protocol):
    """The trainer, as hooks, resuming and the handling of non-finite gradients see it.

    Methods are collective: every rank must call them.
    """

    cfg: Config
    world: World
    layout: Layout
    backend: Backend
    state: TrainState
    run: Run
    log: LogHandle
    meter: Meter
    checkpoints: Checkpoints

    @property
    def task(self) -> Task:
        """What the run learns."""
        ...

    @property
    def hooks(self) -> Sequence[Hook]:
        """All hooks, in the order in which they are called."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        ...

    @property
    def position(self) -> int:
        """Examples taken from the data so far, by all ranks together."""
        ...

    @property
    def metrics(self) -> dict[str, Any]:
        """The latest value of each metric."""
        ...

    @property
    def examples_per_step(self) -> int:
        """Examples in one optimizer step over all ranks."""
        ...

    @property
    def done(self) -> bool:
        """Whether the step that was taken last is the last of the run."""
        ...

    def evaluate(self) -> float:
        """Return the mean loss over the validation set."""
        ...

    def generate(self) -> str:
        """Return a sample."""
        ...

    def save(self, *, best: bool = False) -> None:
        """Make a checkpoint of the run as it is now."""
        ...


def due(step: int, interval: int) -> bool:
    """Say whether ``step`` is a multiple of ``interval``; an interval of 0 is never due."""
    return interval > 0 and step % interval == 0


class Hook:
    """Something that happens between steps, on every rank; each hook decides for itself whether it is due."""

    def at_start(self, trainer: Training) -> None:
        """Is called before the first step."""

    def after_step(self, trainer: Training) -> None:
        """Is called after each step that counts; ``trainer.state.step`` includes it."""

    def at_end(self, trainer: Training) -> None:
        """Is called after the last step, unless the run was interrupted."""

    def close(self) -> None:
        """Is called however the run ended."""

    def stop_reason(self) -> str:
        """Return why the run should end after this step, the same on all ranks; empty: it should not."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should store of this hook, ready for JSON, under the name of its class."""
        return {}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
