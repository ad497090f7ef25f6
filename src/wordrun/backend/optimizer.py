"""Sets the learning rates of any torch optimizer, and saves and restores its state by name.

A checkpoint stores the state ``key`` of the parameter ``name`` as the tensor ``optimizer.name.key`` or, if it is a
Python number, as the 0-dimensional tensor ``number.name.key``. Parameters may have different states, or none. What
the optimizer changes in its parameter groups is saved as well, see ``wordrun.backend.groups``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wordrun.backend.groups import GROUPS, OFF, GroupValues, StateError
from wordrun.checkpoint.folder import DamagedError
from wordrun.checkpoint.index import StoredTensor
from wordrun.common.errors import ConfigError, first_line
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.dist import torch_private
from wordrun.dist.collectives import all_max, gather_json
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


def require_optimizer(found: Any, part: str) -> None:
    """Raise a ConfigError unless what the code of ``part`` returned is one optimizer that needs no closure."""
    if not hasattr(found, "param_groups"):
        raise ConfigError(
            f"{part} should return one torch optimizer, not {type(found).__name__}; a schedule is a part of its own",
            page="extend.md#an-optimizer",
        )
    needed = [p for p in inspect.signature(found.step).parameters.values() if p.default is p.empty and p.kind < 2]
    if needed:
        raise ConfigError(
            f"{part}: {type(found).__name__}.step needs a {needed[0].name}, and steps with closures are not supported: "
            "use an optimizer whose step() takes none"
        )


def left_out(optimizer: Optimizer, parameters: Named) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable ``parameters`` that are in no group of ``optimizer``."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in parameters if p.requires_grad and p not in known]


def warn_of_left_out(optimizer: Optimizer, parameters: Named, part: str, *, everywhere: torch.device | None) -> None:
    """Warn of trainable ``parameters`` that are in no group of ``optimizer``, once for all ranks.

    Args:
        optimizer: the optimizer of ``part``.
        parameters: this rank's.
        part: what the warning calls it.
        everywhere: if each pipeline stage has other parameters, the device on which to ask all ranks for theirs.
    """
    parameters = list(parameters)
    names = [name for name, p in parameters if p.requires_grad]
    out = [name for name, _ in left_out(optimizer, parameters)]
    if everywhere is not None and all_max(torch.tensor(len(out), device=everywhere)):
        found = gather_json([names, out], everywhere)
        names, out = ([name for each in found for name in each[kind]] for kind in (0, 1))
    if out := [*dict.fromkeys(out)]:
        shown = ", ".join(out[:3]) + ", ..." * (len(out) > 3)
        LOGGER.warning(
            "%s leaves out %d of %d trainable parameters: %s (set requires_grad=False if that is intended)",
            part, len(out), len({*names}), shown, extra=FIRST_RANK,
        )  # fmt: skip


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

    Its name is ``optimizer.WEIGHT.KEY``, ``number.WEIGHT.KEY``, ``groups.WEIGHT``, ``model.WEIGHT`` or
    ``hooks.HOOK.WEIGHT``.
    """
    kind, _, name = stored.partition(".")
    if kind == "hooks":
        return name.partition(".")[2]
    return name if kind in ("model", "groups") else name.rpartition(".")[0]


def tensors_of(optimizer: Optimizer, parameters: Named, part: str = "") -> dict[str, Tensor]:
    """Return the state of ``optimizer`` by checkpoint name; if two parameters share a name, the first one's state.

    Raises:
        StateError: it has something that a checkpoint cannot hold; the message calls the optimizer ``part``.
    """
    found: dict[str, Tensor] = {}
    who = part or type(optimizer).__name__
    for name, parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(key, str) or "." in key:
                raise StateError(f"{who} keeps a state of {name} under the key {key!r}: use a string without a point")
            if isinstance(value, Tensor):
                if not _is_plain(value, parameter):
                    raise StateError(
                        f"{who} keeps {key} of {name} as {type(value).__name__}, a kind of tensor that a checkpoint "
                        f"cannot restore: keep torch's own tensors, {OFF}"
                    )
                found.setdefault(f"{TENSOR}{name}.{key}", value)
            elif isinstance(value, int | float):
                exact = torch.float64 if isinstance(value, float) else None
                found.setdefault(f"{NUMBER}{name}.{key}", torch.tensor(value, dtype=exact))
            elif value is not None:
                raise StateError(
                    f"{who} keeps {key} of {name} as {type(value).__name__}, which a checkpoint cannot hold: keep a "
                    f"tensor or a number, {OFF}"
                )
    return found


def _is_plain(value: Any, parameter: Any) -> bool:
    """Return whether a state is a tensor of torch's own, sharded or not, or of the same type as its parameter."""
    kinds = [type(each.to_local() if torch_private.is_sharded(each) else each) for each in (value, parameter)]
    return kinds[0] in (Tensor, nn.Parameter, kinds[1])


class SavedState:
    """The state of an optimizer as checkpoints have it.

    Args:
        optimizer: the optimizer, before its first step.
        part: what messages call it.
        parameters: yields this rank's parameters with their names; with ``once``, without a second copy of a weight.
        checks: whether to check after the first step that a checkpoint can hold the state.
    """

    def __init__(self, optimizer: Optimizer, part: str, parameters: Callable[..., Named], *, checks: bool) -> None:
        self.optimizer, self.part, self.parameters, self._checks = optimizer, part, parameters, checks
        self._groups = GroupValues(optimizer, part)
        self._idle = [p for _, p in left_out(optimizer, parameters())]

    def zero_grad(self) -> None:
        """Discard all gradients, also those of parameters that the optimizer leaves out."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._idle:
            parameter.grad = None

    def check(self) -> None:
        """Check once, after the first step, that a checkpoint can hold the state.

        Raises:
            StateError: it cannot.
        """
        if self._checks:
            self._checks = False
            tensors_of(self.optimizer, self.parameters(once=True), self.part)
            self._groups.changed()

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's state by checkpoint name.

        Raises:
            StateError: a checkpoint cannot hold it.
        """
        once, names = list(self.parameters(once=True)), {p: name for name, p in self.parameters()}
        groups = self._groups.tensors(names, once[0][0]) if once else {}
        return tensors_of(self.optimizer, once, self.part) | groups

    def restored(
        self, stored: Mapping[str, StoredTensor], unpadded_rows: Mapping[tuple[str, torch.Size], int]
    ) -> Restored:
        """Return what restores the state from the checkpoint with the tensors ``stored``; see ``Restored``."""
        return Restored(self.optimizer, self.parameters(), stored, unpadded_rows, self._groups)


class Restored:
    """Restores the state of ``optimizer`` from a checkpoint: read it into ``tensors``, then call ``load``.

    Args:
        optimizer: the optimizer; its parameter groups keep their options, except for values that it had changed.
        parameters: this rank's parameters with their names.
        stored: the checkpoint's tensors, by name.
        unpadded_rows: the rows without padding, by name and shape, of parameters that end in padding.
        groups: the values of its groups.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Named, stored: Mapping[str, StoredTensor],
        unpadded_rows: Mapping[tuple[str, torch.Size], int], groups: GroupValues,
    ) -> None:  # fmt: skip
        self.optimizer, self.parameters, self.unpadded_rows = optimizer, list(parameters), unpadded_rows
        self.groups, self.stored = groups, stored
        self.tensors: dict[str, Tensor] = {name: stored[name].empty() for name in stored if name.startswith(GROUPS)}
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

        Raises:
            DamagedError: the values of the groups cannot be read.
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
        # torch casts states to the dtype of the parameter; that of "step" it chooses with a reason.
        for parameter, number in index.items():
            kept = self.optimizer.state.get(parameter, {})
            for key, value in state.get(number, {}).items():
                now = kept.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype and key != "step":
                    kept[key] = value.to(now.device)
        self._load_groups()

    def _load_groups(self) -> None:
        names = [name for name in self.tensors if name.startswith(GROUPS)]
        try:
            self.groups.load([self.tensors[name] for name in names], {p: name for name, p in self.parameters})
        except Exception as error:  # they may contain anything
            if not names:
                raise
            folder = self.stored[names[0]].folder
            raise DamagedError(f"{folder} is damaged: {names[0]}: {first_line(error)}") from None
