"""What a backend is, and the table of those there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wordrun.backend.stopwatch import Stopwatch
from wordrun.config import Config
from wordrun.data.loader import Batch
from wordrun.dist import World
from wordrun.model import GPT

TABLE = {"DDP": "wordrun.backend.ddp:DDPBackend"}
"""Name, as in train.backend, to module and class. The options are in ``wordrun.config.BACKENDS``."""

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step leaves behind, still on the device: reading it waits for the step to end."""

    loss: Tensor
    """Mean loss over this rank's sequences, in nats per token."""
    grad_norm: Tensor
    """Norm of all gradients together, before clipping."""


class Backend(Protocol):
    """One optimizer step, and what evaluation needs."""

    device: torch.device
    model: GPT
    """The plain module, for evaluation and generation."""
    dp_rank: int
    """Which share of the data this rank sees."""
    dp_size: int
    """How many shares there are."""
    dtype: torch.dtype
    """Precision of the computation."""

    def train_step(self, batches: Sequence[Batch], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``, the micro-steps of it; every rank must call this."""
        ...

    def close(self) -> None:
        """Give back what belongs to the process group, which ends next; no step can follow."""
        ...

    def autocast(self) -> torch.autocast:
        """Return the context in which the model computes in ``dtype``."""
        ...

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sequence of ``batch``, (B,), without gradients; every rank must call this."""
        ...


def build(cfg: Config, world: World, model: GPT, make_optimizer: MakeOptimizer) -> Backend:
    """Return the backend that ``train.backend`` names, around ``model``; every rank must call this."""
    module, _, name = TABLE[cfg.train.backend].partition(":")
    backend: Backend = getattr(importlib.import_module(module), name)(cfg, world, model, make_optimizer)
    return backend
