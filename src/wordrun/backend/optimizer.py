"""Sets the learning rates of any torch optimizer, and saves and restores its state by name.

A checkpoint stores the state ``key`` of the parameter ``name`` as the tensor ``optimizer.name.key`` or, if it is a
Python number, as the 0-dimensional tensor ``number.name.key``. Parameters may have different states, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wordrun.checkpoint.index import StoredTensor
from wordrun.dist.mesh import Layout
from wordrun.model.base import Rows

TENSOR, NUMBER = "optimizer.", "number."
Named = Iterable[tuple[str, nn.Parameter]]


class NamedParameters(list[tuple[str, nn.Parameter]]):
    """A model's trained parameters by name, with what an optimizer may want to know about them.

    Args:
        parameters: this rank's parameters, or its shards of them.
        matrices: the hidden matrices among them, as from ``Model.matrices``; None: all of two or more dimensions.
        group: the process group whose ranks hold the shards of the same parameters, or copies; None: this rank alone.
        device: where the group communicates; None: where the parameters are.
        layout: how the ranks divide the parameters.
    """

    def __init__(
        self, parameters: Named, matrices: Mapping[str, Rows] | None = None, group: Any = None,
        device: torch.device | None = None, layout: Layout | None = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters)
        self.matrices = {name: Rows() for name, p in self if p.dim() >= 2} if matrices is None else matrices
        self.group, self.device, self.layout = group, device, layout or Layout()


def scale_rates(optimizer: Optimizer, hidden: set[nn.Parameter], factors: tuple[float, float]) -> None:
    """Multiply the learning rates of ``hidden`` matrices and of all other parameters by ``factors``, for muP.

    Groups that have both are split. The product of learning rate and weight decay stays as it is: how fast unused
    weights shrink should not depend on the width.
    """
    for group in list(optimizer.param_groups):
        rest = [p for p in group["params"] if p not in hidden]
        if rest and len(rest) < len(group["params"]):
            among = [p for p in group["params"] if p in hidden]
            group["params"] = rest
            optimizer.add_param_group({**group, "params": among})
    for group in optimizer.param_groups:
        factor = factors[0] if hidden.issuperset(group["params"]) else factors[1]
        group["lr"] *= factor
        group["weight_decay"] = group.get("weight_decay", 0.0) / factor


def remember_ratios(optimizer: Optimizer, learning_rate: float) -> Optimizer:
    """Store in each parameter group its learning rate relative to ``learning_rate``; return ``optimizer``."""
    for group in optimizer.param_groups:
        group["lr_ratio"] = group["lr"] / learning_rate
    return optimizer


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of this step; the parameter groups keep their ratios."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_ratio"]


def parameter_of(stored: str) -> str:
    """Return the weight to which a checkpoint's tensor belongs.

    Its name is ``optimizer.WEIGHT.KEY``, ``number.WEIGHT.KEY``, ``model.WEIGHT`` or ``hooks.HOOK.WEIGHT``.
    """
    kind, _, name = stored.partition(".")
    if kind == "hooks":
        return name.partition(".")[2]
    return name if kind == "model" else name.rpartition(".")[0]


def tensors_of(optimizer: Optimizer, parameters: Named) -> dict[str, Tensor]:
    """Return the state of ``optimizer`` by checkpoint name; if two parameters share a name, the first one's state."""
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
    """Restores the state of ``optimizer`` from a checkpoint: read it into ``tensors``, then call ``load``.

    Args:
        optimizer: the optimizer; its parameter groups keep their options.
        parameters: this rank's parameters with their names.
        stored: the checkpoint's tensors, by name.
        unpadded_rows: the rows without padding, by name and shape, of parameters that end in padding.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Named, stored: Mapping[str, StoredTensor],
        unpadded_rows: Mapping[tuple[str, torch.Size], int],
    ) -> None:  # fmt: skip
        self.optimizer, self.parameters, self.unpadded_rows = optimizer, list(parameters), unpadded_rows
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[str, list[tuple[str, str]]] = {}
        for full in stored:
            if full.startswith((TENSOR, NUMBER)):
                self._keys.setdefault(parameter_of(full), []).append((full.rpartition(".")[2], full))
        for name, parameter in self.parameters:
            for key, full in self._keys.get(name, ()):
                self.tensors.setdefault(full, self._room(name, parameter, key, stored[full]))

    def _room(self, name: str, parameter: nn.Parameter, key: str, facts: StoredTensor) -> Tensor:
        """Return the tensor to read a state into: the current one, or a new one sharded like the parameter."""
        rows = self.unpadded_rows.get((name, parameter.shape))
        shape = parameter.shape if rows is None else torch.Size((rows, *parameter.shape[1:]))
        # State of a different shape than the parameter, such as a step count, is the same on every rank.
        like = parameter.detach() if facts.shape == shape else torch.empty(facts.shape)
        present = self.optimizer.state.get(parameter, {}).get(key)
        if isinstance(present, Tensor) and present.shape == like.shape:
            return present
        return torch.zeros_like(like, dtype=facts.dtype)

    def load(self, shared: Mapping[str, float]) -> None:
        """Load the state in ``tensors`` into the optimizer.

        Args:
            shared: numbers for all parameters with state, from the manifest of an older checkpoint.
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
                tensor = self.tensors[full].clone() if full in used else self.tensors[full]  # names may repeat
                values[key] = tensor.item() if full.startswith(NUMBER) else tensor
                used.add(full)
            if values:
                state[index[parameter]] = {key: torch.tensor(value) for key, value in shared.items()} | values
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
