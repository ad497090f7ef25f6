"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wordrun.backend.stopwatch import Stopwatch
from wordrun.checkpoint.pieces import Group
from wordrun.config import Config, part_of
from wordrun.data.batch import Batch
from wordrun.dist import World
from wordrun.dist.mesh import Layout
from wordrun.model import Transformer

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step leaves behind, still on the device: reading it waits for the step to end."""

    loss: Tensor
    """Mean loss over the sequences of this rank's share of the batch, in nats per token."""
    grad_norm: Tensor
    """Norm of all gradients of the whole model together, before clipping."""


@dataclass(frozen=True)
class Job:
    """What a backend is made from."""

    cfg: Config
    world: World
    layout: Layout
    """Which ranks do what together."""
    vocab_size: int
    """Size of the tokenizer's vocabulary."""
    make_optimizer: MakeOptimizer
    weights: Mapping[str, Tensor] | None = None
    """What the parameters begin with, by name and whole; None: random values."""


@dataclass(frozen=True)
class Save:
    """A copy of the state of training, on its way to the disk."""

    facts: dict[str, Any]
    """What ``load`` needs besides the files, ready for JSON, with the ``kind`` of their format."""
    write: Callable[[Path, Group], None]
    """Writes this rank's files into a folder, together with the other ranks of a group."""
    in_background: bool
    """Whether another thread may do that while training goes on."""


class Backend(Protocol):
    """One optimizer step, and what evaluation and generation need. Every rank must call each of these methods."""

    device: torch.device
    dtype: torch.dtype
    """Precision of the computation."""
    parts: Sequence[Transformer]
    """What this rank holds of the model: all of it, or the stages of a pipeline."""

    def train_step(self, batches: Sequence[Batch], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``, the micro-steps of it."""
        ...

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sequence of ``batch``, (B,), without gradients."""
        ...

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last of ``tokens`` (B, T), as (B, V), without gradients."""
        ...

    def begin_save(self, own: Mapping[str, Tensor]) -> Save:
        """Copy the state of training as it is now.

        Args:
            own: tensors of this rank alone that belong to the checkpoint, under names that no other rank uses.
        """
        ...

    def load(self, folder: Path, facts: dict[str, Any], own: Sequence[str] = ()) -> dict[str, Tensor]:
        """Take the state of training from a checkpoint, which any layout of ranks may have written.

        Args:
            folder: the checkpoint.
            facts: the ``facts`` of the save.
            own: names of this rank's own tensors, which are returned.

        Raises:
            ConfigError: this backend cannot read what that one has written.
        """
        ...

    def close(self) -> None:
        """Give back what belongs to the process group, which ends next; no step can follow."""
        ...


def build(job: Job) -> Backend:
    """Return the backend that ``train.backend`` names; every rank must call this."""
    backend: Backend = part_of("backend", job.cfg.backend).load()(job)
    return backend
