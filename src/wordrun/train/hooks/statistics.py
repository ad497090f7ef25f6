"""Measures the gradients and the activations of each layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wordrun.backend.sharded_tensors import local
from wordrun.dist import torch_private
from wordrun.dist.collectives import gather_json
from wordrun.model.base import Model
from wordrun.train.hooks.base import Hook, Training, due, native
from wordrun.train.hooks.options import StatisticsConfig


def statistics(options: StatisticsConfig) -> Statistics:
    """Return the hook for these options."""
    return GradientStatistics(options) if options.gradients else Statistics(options)


class Statistics(Hook):
    """Adds a line of metrics every ``interval`` steps; a metric of block 3 is named ``activation_rms/blocks.3``.

    In other steps, nothing is measured and no module has a hook.
    """

    def __init__(self, options: StatisticsConfig) -> None:
        self.options = options
        self._handles: list[RemovableHandle] = []
        self._layers: dict[str, int] = {}
        """Row of each layer in the tables, the same on all ranks."""
        self._sums = self._largest = torch.empty(0)
        """Tables with a row for each layer: sums of squared gradients, sums of squared activations and their number;
        largest gradient and activation."""
        self._passes: dict[int, list[tuple[Tensor, int, Tensor]]] = {}
        """Sum of squares, number and largest of the activations in each forward pass of this step, by row."""

    def setup(self, trainer: Training) -> None:
        """Collect the names of all layers: the ranks of a pipeline have different ones."""
        mine = list(dict.fromkeys(self._mine(trainer)))
        found = [name for names in gather_json(mine, trainer.backend.device) for name in names]
        self._layers = {name: row for row, name in enumerate(dict.fromkeys(found))}

    def before_step(self, trainer: Training) -> None:
        """Prepare the step if it is due."""
        self.close()  # after a step that did not count
        if not due(trainer.step + 1, self.options.interval):
            return
        rows = len(self._layers)
        self._sums = torch.zeros(rows, 3, device=trainer.backend.device)
        self._largest = torch.zeros(rows, 2, device=trainer.backend.device)
        self._passes = {}
        if self.options.activations:
            for part in trainer.backend.parts:
                for name, block in part.named_blocks().items():
                    row = self._layers[name]
                    self._handles.append(block.register_forward_hook(self._measure_activations(row)))

    def after_step(self, trainer: Training) -> None:
        """Record what was measured in this step."""
        if due(trainer.step, self.options.interval):
            self.close()
            self._add_passes(trainer)
            trainer.log_metrics(self._metrics())

    def close(self) -> None:
        """Remove the hooks of the modules."""
        while self._handles:
            self._handles.pop().remove()

    def _mine(self, trainer: Training) -> Iterable[str]:
        """Return the layers of this rank's part of the model."""
        return (name for part in trainer.backend.parts for name in part.named_blocks())

    def _measure_activations(self, row: int) -> Any:
        def measure(module: Any, inputs: Any, output: Any) -> None:
            if module.training and isinstance(output, Tensor):
                mine = local(output.detach())
                square, largest = _measured(mine, self._sums.device)
                self._passes.setdefault(row, []).append((square, mine.numel(), largest))

        return measure

    def _add_passes(self, trainer: Training) -> None:
        """Add the forward passes to the tables, except the one that only teaches a new pipeline its shapes."""
        cfg = trainer.cfg
        count = trainer.gas * cfg.backend.microbatches_of(cfg.model.batch_size, trainer.layout.pp)
        for row, passes in self._passes.items():
            squares, numbers, largest = zip(*passes[-count:], strict=True)
            self._sums[row, 1], self._sums[row, 2] = torch.stack(squares).sum(), sum(numbers)
            self._largest[row, 1] = torch.stack(largest).max()

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of all ranks' tables; every rank must call this."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        found: dict[str, float] = {}
        for layer, (gradient, activation, count), (most_gradient, most_activation) in zip(
            self._layers, self._sums.tolist(), self._largest.tolist(), strict=True
        ):
            if self.options.gradients:
                found |= {f"grad_norm/{layer}": math.sqrt(gradient), f"grad_max/{layer}": most_gradient}
            if count:
                found |= {
                    f"activation_rms/{layer}": math.sqrt(activation / count),
                    f"activation_max/{layer}": most_activation,
                }
        return found


class GradientStatistics(Statistics):
    """Measures gradients, too; a metric of block 3 is named ``grad_norm/blocks.3``."""

    def _mine(self, trainer: Training) -> Iterable[str]:
        backend = native(trainer, "statistics")
        return (_layer(name, backend.parts) for name, _ in backend.named_parameters(once=True))

    @torch.no_grad()
    def on_gradients(self, trainer: Training) -> None:
        """Add the gradients of this rank to the tables, if the step is due."""
        if not due(trainer.step + 1, self.options.interval):
            return
        at = trainer.layout.of_parameters
        backend = native(trainer, "statistics")
        for name, parameter in backend.named_parameters(once=True):
            gradient = parameter.grad
            if gradient is None or not local(gradient).numel():
                continue
            row, copies = self._layers[_layer(name, backend.parts)], at.replicate * at.shard * at.tp
            if torch_private.is_sharded(gradient):
                mesh = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                copies //= math.prod(size for size, placement in mesh if not placement.is_replicate())
            square, largest = _measured(local(gradient), self._sums.device)
            # Ranks that hold the same gradient contribute equal shares of it.
            self._sums[row, 0] += square / copies
            self._largest[row, 0] = torch.maximum(self._largest[row, 0], largest)


def _layer(name: str, parts: Sequence[Model]) -> str:
    """Return the layer of a parameter of ``parts``: its block, or the module outside of the blocks."""
    return next(filter(None, (part.block_of(name) for part in parts)), name.partition(".")[0])


def _measured(tensor: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sum of squares and the largest absolute value of ``tensor``."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm.to(device) ** 2, torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32).to(device)
