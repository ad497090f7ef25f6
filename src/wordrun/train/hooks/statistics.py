"""Measures the gradients and the activations of each layer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from wordrun.backend.native import local
from wordrun.config import StatisticsConfig
from wordrun.dist.collectives import gather_json
from wordrun.train.training import Hook, Training, due, native


class Statistics(Hook):
    """Adds a line of metrics every ``interval`` steps; a metric of block 3 is named ``grad_norm/blocks.3``.

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

    def setup(self, trainer: Training) -> None:
        """Agree on the layers of the model, of which the ranks of a pipeline have different ones."""
        backend = trainer.backend
        mine = [_layer(name) for part in backend.parts for name, _ in part.named_parameters()]
        found = [name for names in gather_json(list(dict.fromkeys(mine)), backend.device) for name in names]
        if not self._layers and self.options.gradients:
            native(trainer, "statistics").on_gradients.append(lambda: self._measure_gradients(trainer))
        self._layers = {name: row for row, name in enumerate(dict.fromkeys(found))}

    def before_step(self, trainer: Training) -> None:
        """Prepare the step if it is due."""
        self.close()  # after a step that did not count
        if not due(trainer.step + 1, self.options.interval):
            return
        rows = len(self._layers)
        self._sums = torch.zeros(rows, 3, device=trainer.backend.device)
        self._largest = torch.zeros(rows, 2, device=trainer.backend.device)
        if self.options.activations:
            for part in trainer.backend.parts:
                for key, block in part.blocks.items():
                    row = self._layers[f"blocks.{key}"]
                    self._handles.append(block.register_forward_hook(self._measure_activations(row)))

    def after_step(self, trainer: Training) -> None:
        """Record what was measured in this step."""
        if due(trainer.step, self.options.interval):
            self.close()
            trainer.log_metrics(self._metrics())

    def close(self) -> None:
        """Remove the hooks of the modules."""
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def _measure_gradients(self, trainer: Training) -> None:
        if not due(trainer.step + 1, self.options.interval):
            return
        at = trainer.layout
        for name, parameter in native(trainer, "statistics").named_parameters(once=True):
            gradient = parameter.grad
            if gradient is None or not local(gradient).numel():
                continue
            row, copies = self._layers[_layer(name)], at.replicate * at.shard * at.tp
            if isinstance(gradient, DTensor):
                mesh = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                copies //= math.prod(size for size, placement in mesh if not placement.is_replicate())
            square, largest = _measured(local(gradient), self._sums.device)
            # Ranks that hold the same gradient contribute equal shares of it.
            self._sums[row, 0] += square / copies
            self._largest[row, 0] = torch.maximum(self._largest[row, 0], largest)

    def _measure_activations(self, row: int) -> Any:
        @torch.no_grad()
        def measure(output: Tensor) -> None:
            square, largest = _measured(output, self._sums.device)
            self._sums[row, 1] += square
            self._sums[row, 2] += output.numel()
            self._largest[row, 1] = torch.maximum(self._largest[row, 1], largest)

        def hook(module: Any, inputs: Any, output: Any) -> None:
            # Evaluations do not count, nor the pass in which a pipeline learns its shapes.
            if module.training and torch.is_grad_enabled() and isinstance(output, Tensor):
                measure(local(output.detach()))

        return hook

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


def _layer(name: str) -> str:
    """Return the layer of a parameter: its block, or the module outside of the blocks."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def _measured(tensor: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sum of squares and the largest absolute value of ``tensor``."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm.to(device) ** 2, torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32).to(device)
