"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wordrun.backend.optimizer import remember_ratios
from wordrun.backend.precision import choose_dtype
from wordrun.backend.stopwatch import Stopwatch
from wordrun.checkpoint.shards import Group
from wordrun.config import Config, part_of
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.model import Model

MakeModel = Callable[..., Any]
"""Returns a ``Model`` on the meta device: all of it, or with the argument ``layers`` the stage with those blocks."""
MakeOptimizer = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step leaves behind, still on the device: reading it waits for the step to end."""

    loss: Tensor
    """Mean loss over the sequences of this rank's share of the batch, in nats per token."""
    grad_norm: Tensor
    """Norm of the gradients of the full model, before clipping."""


@dataclass(frozen=True)
class BackendSpec:
    """What a backend is built from."""

    cfg: Config
    world: World
    layout: Layout
    """How the ranks divide the work."""
    make_model: MakeModel
    make_optimizer: MakeOptimizer
    """Returns the optimizer over named parameters."""
    weights: Mapping[str, Tensor] | None = None
    """Initial values of the parameters, by name and unsharded; None: random ones."""

    @cached_property
    def device(self) -> torch.device:
        """This rank's device."""
        return torch.device(self.world.device)

    def optimizer(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the run's optimizer over the named ``parameters``."""
        return remember_ratios(self.make_optimizer(parameters), self.cfg.optimizer.learning_rate)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Precision of the computation."""
        return choose_dtype(self.cfg.train.dtype, self.device)


@dataclass(frozen=True)
class Save:
    """A copy of the training state, ready to be written."""

    facts: dict[str, Any]
    """What ``load`` needs besides the files, serialisable as JSON, with the ``kind`` of their format."""
    write: Callable[[Path, Group], None]
    """Writes this rank's files into a folder, together with the other ranks of a group."""
    in_background: bool
    """Whether another thread may call ``write`` while training continues."""


class Backend(Protocol):
    """One optimizer step, and what evaluation and generation need. Every rank must call each of these methods.

    A batch is whatever the model's ``losses`` takes, on the backend's device.
    """

    device: torch.device
    dtype: torch.dtype
    """Precision of the computation."""
    parts: Sequence[Model]
    """This rank's part of the model: all of it, or its stages of a pipeline."""

    def train_step(self, batches: Sequence[Any], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``, one for each micro-step."""

    def losses(self, batch: Any) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), without gradients."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Return a language model's logits for the last of ``tokens`` (B, T), as (B, V), without gradients."""

    def begin_save(self, own: Mapping[str, Tensor]) -> Save:
        """Copy the present training state.

        Args:
            own: further tensors of this rank for the checkpoint, under names that no other rank uses.
        """

    def load(self, folder: Path, facts: dict[str, Any], own: Sequence[str] = ()) -> dict[str, Tensor]:
        """Restore the training state from a checkpoint, which any layout of ranks may have written.

        Args:
            folder: the checkpoint.
            facts: the ``facts`` of the save.
            own: names of this rank's own tensors, which are returned.

        Raises:
            ConfigError: this backend cannot read checkpoints of that kind.
        """

    def close(self) -> None:
        """Release whatever holds the process group, which is destroyed next; no step can follow."""


def build(spec: BackendSpec) -> Backend:
    """Return the backend that ``train.backend`` names; every rank must call this."""
    backend: Backend = part_of("backend", spec.cfg.backend).load()(spec)
    return backend
