"""Keeps an exponential moving average of the weights (Polyak and Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wordrun.backend.sharded_tensors import local
from wordrun.checkpoint.load import MODEL
from wordrun.common.log import LOGGER
from wordrun.dist import torch_private
from wordrun.train.hooks.base import Hook, Training, due, native
from wordrun.train.hooks.options import EMAConfig
from wordrun.train.metrics import QUIET


class EMA(Hook):
    """Averages what training changes, parameters and running statistics, sharded like the weights themselves."""

    def __init__(self, options: EMAConfig) -> None:
        self.options = options
        self.updates = 0
        self.averages: dict[str, Tensor] = {}
        """The averaged weights by name."""
        self._parameters: dict[str, Tensor] = {}

    @torch.no_grad()
    def setup(self, trainer: Training) -> None:
        """Start from the weights: the initial ones, or those of a checkpoint without averages."""
        weights = self._trained(trainer)
        self.updates = 0
        # Parameters stay the same objects, so they are looked up once. Empty: there are buffers, which modules may
        # replace by other tensors, so all are looked up at each step.
        self._parameters = weights if all(isinstance(w, nn.Parameter) for w in weights.values()) else {}
        self.averages = self.averages or {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        for name, average in self.averages.items():
            average.copy_(weights[name])

    def at_start(self, trainer: Training) -> None:
        """Log that a resumed run starts a new average."""
        if trainer.step and not self.updates:
            LOGGER.info("the checkpoint has no averaged weights: the average starts at step %d", trainer.step)

    def after_step(self, trainer: Training) -> None:
        """Update the averages, and evaluate them if this step was evaluated."""
        if due(trainer.step, self.options.interval):
            self._update(trainer)
        if self.options.evaluate and trainer.state.evaluated_step == trainer.step:
            with self.applied(trainer):
                values = trainer.measure()
            trainer.log_metrics({f"ema_{name}": value for name, value in values.items()})
            shown = "".join(f"  {name} {value:.4g}" for name, value in values.items() if name not in QUIET)
            LOGGER.info("step %d  averaged weights: val_loss %.4f%s", trainer.step, values["val_loss"], shown)

    @torch.no_grad()
    def _update(self, trainer: Training) -> None:
        self.updates += 1
        keep = min(self.options.decay, (1 + self.updates) / (10 + self.updates))
        weights = self._parameters or self._trained(trainer)
        torch_private.move_towards(_local(self.averages.values()), _local(weights.values()), 1 - keep)

    @contextmanager
    def applied(self, trainer: Training) -> Iterator[None]:
        """Compute with the averaged weights within a ``with`` block; every rank must call this."""
        with native(trainer, "ema").using({MODEL + name: average for name, average in self.averages.items()}):
            yield

    def state(self) -> dict[str, Any]:
        """Return the number of updates."""
        return {"updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the number of updates."""
        self.updates = int(state["updates"])

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the averaged weights."""
        return self.averages

    def _trained(self, trainer: Training) -> dict[str, Tensor]:
        """Return this rank's shards of all weights except frozen parameters and integers, by name."""
        return {
            name.removeprefix(MODEL): tensor
            for name, tensor in native(trainer, "ema").model_state().items()
            if tensor.is_floating_point() and (tensor.requires_grad or not isinstance(tensor, nn.Parameter))
        }


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor) for tensor in tensors]
