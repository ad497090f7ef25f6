"""What checkpoints and the start of a run need from a task."""

from __future__ import annotations

from typing import Any, Protocol

from wordrun.plan.shapes import ModelShapes


class TaskProtocol(Protocol):
    """What checkpoints and the start of a run need from a task."""

    unit: str
    """What the examples are called."""

    def fixed(self) -> dict[str, Any]:
        """Return what a resumed run must share with its checkpoint, besides options; keys are for people to read."""

    def manifest(self, position: int) -> dict[str, Any]:
        """Return the task's entries for a checkpoint's manifest after ``position`` examples."""

    def facts(self) -> dict[str, Any]:
        """Return what run.json says about the data and the model."""

    def shapes(self) -> ModelShapes | None:
        """Return the shapes of the run's model, from which its memory is estimated; None: there is no estimate."""

    def announce(self, examples: int) -> None:
        """Log what the data are, given the number of examples to train on."""
