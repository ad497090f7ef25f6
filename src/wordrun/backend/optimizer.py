"""What backends do with any of torch's optimizers: set learning rates, and save and restore the state by names.

In a checkpoint the state ``key`` of the parameter ``name`` is the tensor ``optimizer.name.key``, or, if it is a Python
number, the 0-dimensional tensor ``number.name.key``. Parameters may have different states, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

TENSOR, NUMBER = "optimizer.", "number."
Named = Iterable[tuple[str, nn.Parameter]]


def remember_ratios(optimizer: Optimizer, learning_rate: float) -> Optimizer:
    """Note in each parameter group its learning rate relative to ``learning_rate``; return ``optimizer``."""
    for group in optimizer.param_groups:
        group["lr_ratio"] = group["lr"] / learning_rate
    return optimizer


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of this step; the parameter groups keep their ratios."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_ratio"]


def tensors_of(optimizer: Optimizer, parameters: Named) -> dict[str, Tensor]:
    """Return the state of ``optimizer`` by its names in a checkpoint; of parameters with one name, the first one's."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found.setdefault(f"{TENSOR}{name}.{key}", value)
            elif isinstance(value, int | float):
                exact = torch.float64 if isinstance(value, float) else None
                found.setdefault(f"{NUMBER}{name}.{key}", torch.tensor(value, dtype=exact))
            elif value is not None:
                raise TypeError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as {type(value).__name__}, which a checkpoint "
                    "cannot hold: keep a tensor or a number"
                )
    return found


class Restored:
    """The state of ``optimizer`` that a checkpoint holds: ``tensors`` to be read, then ``load`` to apply them.

    Args:
        optimizer: keeps the options of its parameter groups.
        parameters: those of this rank.
        stored: what the checkpoint holds, by name.
    """

    def __init__(self, optimizer: Optimizer, parameters: Named, stored: Mapping[str, TensorStorageMetadata]) -> None:
        self.optimizer, self.parameters = optimizer, list(parameters)
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[str, list[tuple[str, str]]] = {}
        for full in stored:
            if full.startswith((TENSOR, NUMBER)):
                name, _, key = full.partition(".")[2].rpartition(".")
                self._keys.setdefault(name, []).append((key, full))
        for name, parameter in self.parameters:
            for key, full in self._keys.get(name, ()):
                self.tensors.setdefault(full, self._room(parameter, key, stored[full]))

    def _room(self, parameter: nn.Parameter, key: str, facts: TensorStorageMetadata) -> Tensor:
        """Return the tensor to read a state into: the present one, or one that is sharded as the parameter is."""
        present = self.optimizer.state.get(parameter, {}).get(key)
        if isinstance(present, Tensor) and present.shape == facts.size:
            return present
        # What has another shape than the parameter, such as a count of steps, is the same on every rank.
        like = parameter.detach() if facts.size == parameter.shape else torch.empty(facts.size)
        return torch.zeros_like(like, dtype=facts.properties.dtype)

    def load(self, shared: Mapping[str, float]) -> None:
        """Give the optimizer the state that ``tensors`` hold.

        Args:
            shared: numbers that apply to all parameters with state, as older checkpoints have them in their manifest.
        """
        groups = self.optimizer.state_dict()["param_groups"]
        index = {
            parameter: number
            for ours, theirs in zip(self.optimizer.param_groups, groups, strict=True)
            for parameter, number in zip(ours["params"], theirs["params"], strict=True)
        }
        state = {}
        used: set[str] = set()
        for name, parameter in self.parameters:
            values: dict[str, Any] = {}
            for key, full in self._keys.get(name, ()):
                tensor = self.tensors[full].clone() if full in used else self.tensors[full]  # two may have one name
                values[key] = tensor.item() if full.startswith(NUMBER) else tensor
                used.add(full)
            if values:
                state[index[parameter]] = {key: torch.tensor(value) for key, value in shared.items()} | values
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
