"""Saves and restores the state of any torch optimizer by name.

A checkpoint stores the state ``key`` of the parameter ``name`` as the tensor ``optimizer.name.key`` or, if it is a
Python number, as the 0-dimensional tensor ``number.name.key``. Parameters may have different states, or none. What
the optimizer changes in its parameter groups is saved as well (``GroupValues``).
"""

from __future__ import annotations

import json
import numbers
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wordrun.backend.param_groups import Named, left_out
from wordrun.checkpoint.folder import DamagedError
from wordrun.checkpoint.index import StoredTensor
from wordrun.common.errors import UserError, first_line
from wordrun.dist import torch_private

TENSOR, NUMBER = "optimizer.", "number."


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
                raise StateError(f"{who} keeps a state of {name} under the key {key!r}: use a string without a dot")
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
        parameters: yields this rank's parameters with their names; ``once`` omits second copies of a weight.
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
        unpadded_rows: for parameters that end in padding, the number of rows without it, by name and shape.
        groups: the values of its groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Named,
        stored: Mapping[str, StoredTensor],
        unpadded_rows: Mapping[tuple[str, torch.Size], int],
        groups: GroupValues,
    ) -> None:
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
        # torch casts states to the dtype of the parameter, except "step", whose dtype it chooses itself.
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


GROUPS = "groups."
NOT_SAVED = ("params", "param_names", "lr", "lr_ratio")
"""Entries of a group that wordrun or torch sets anew in every run."""
OFF = "or train without checkpoints (train.checkpoint_interval=0)"
Group = dict[str, Any]


class StateError(UserError, TypeError):
    """An optimizer keeps something that a checkpoint cannot hold; the message names the optimizer and what it is."""

    page = "extend/optimizer.md#an-optimizer"


class GroupValues:
    """Keeps track of the values in an optimizer's parameter groups that have changed since it was constructed.

    Args:
        optimizer: the optimizer, before its first step.
        part: what messages call it.
    """

    def __init__(self, optimizer: Optimizer, part: str) -> None:
        self.optimizer, self.part = optimizer, part
        self._initial = [{key: _snapshot(value) for key, value in _own(group)} for group in optimizer.param_groups]

    def changed(self) -> list[dict[str, Any]]:
        """Return for each group the values that have changed, as JSON values.

        Raises:
            StateError: one cannot be saved.
        """
        found = []
        for number, group in enumerate(self.optimizer.param_groups):
            initial, values = self._initial_of(number), dict[str, Any]()
            for key, value in _own(group):
                now = _snapshot(value)
                if key in initial and initial[key] == now:
                    continue
                if isinstance(now, _Other) or not isinstance(key, str):
                    raise StateError(
                        f"{self.part} changes {key!r} of its parameter groups, a {type(value).__name__} that a "
                        f"checkpoint cannot hold: keep it as a tensor in self.state[p], {OFF}"
                    )
                values[key] = now
            found.append(values)
        return found

    def tensors(self, names: Mapping[nn.Parameter, str], first: str) -> dict[str, Tensor]:
        """Return the changed values as a checkpoint's tensors, by name.

        Args:
            names: the names of this rank's parameters.
            first: the first of them that no other pipeline stage has.
        """
        changed = self.changed()
        if not any(changed):
            return {}
        groups = [
            {"names": [names[p] for p in group["params"] if p in names], "values": values}
            for group, values in zip(self.optimizer.param_groups, changed, strict=True)
        ]
        text = bytearray(json.dumps(groups).encode())
        return {f"{GROUPS}{first}": torch.frombuffer(text, dtype=torch.uint8)}

    def load(self, tensors: Sequence[Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """Restore the values in ``tensors``, those of all stages, and reset all other values to their initial ones.

        A group without parameters, or whose parameters are in no stored group, is matched by its number, within the
        stage that had this rank's parameters.

        Args:
            tensors: what ``tensors`` has returned.
            names: the names of this rank's parameters.
        """
        stages: list[list[Group]] = [json.loads(bytes(tensor.numpy())) for tensor in tensors]
        by_name = {name: group["values"] for groups in stages[::-1] for group in groups for name in group["names"]}
        mine = {*names.values()}
        like_ours = [groups for groups in stages if any(mine.intersection(group["names"]) for group in groups)]
        numbered = [group["values"] for group in like_ours[0]] if like_ours else []
        for number, group in enumerate(self.optimizer.param_groups):
            found = next((by_name[names[p]] for p in group["params"] if names.get(p) in by_name), None)
            if found is None:
                found = numbered[number] if number < len(numbered) else {}
            self._reset(number, group)
            for key, value in found.items():
                if key not in NOT_SAVED:
                    group[key] = _restored(value, _device(group, key))

    def _initial_of(self, number: int) -> dict[str, Any]:
        return self._initial[number] if number < len(self._initial) else {}

    def _reset(self, number: int, group: Group) -> None:
        """Reset ``group`` to its initial values."""
        initial = self._initial_of(number)
        for key, value in _own(group):
            if key not in initial:
                del group[key]
            elif initial[key] != _snapshot(value) and not isinstance(initial[key], _Other):
                group[key] = _restored(initial[key], _device(group, key))


def _own(group: Group) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if key not in NOT_SAVED]


def _device(group: Group, key: str) -> torch.device:
    """Return where a tensor in ``group`` belongs: where the present one is, or else the parameters."""
    present = group.get(key)
    like = present if isinstance(present, Tensor) else next(iter(group["params"]), None)
    return torch.device("cpu") if like is None else like.device


@dataclass(frozen=True)
class _Other:
    """Stands for a value that JSON cannot hold; no problem as long as it does not change."""

    value: Any = field(compare=False)
    identity: int
    version: int


def _snapshot(value: Any) -> Any:
    """Return ``value`` for JSON, or an object that shows whether it has changed."""
    try:
        return _plain(value)
    except TypeError:
        return _Other(value, id(value), torch_private.version_of(value) if isinstance(value, Tensor) else 0)


def _plain(value: Any) -> Any:
    """Return ``value`` for JSON.

    Numbers become text of a fixed length: ranks may have different values, but must write files of the same size.

    Raises:
        TypeError: it has a type that cannot be restored.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return {"int": f"{int(value):+021d}"}
    if isinstance(value, numbers.Real):
        return {"float": struct.pack(">d", float(value)).hex()}
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        whole = value.full_tensor() if torch_private.is_sharded(value) else value
        return {"tensor": _plain(whole.item()), "dtype": str(value.dtype).removeprefix("torch."), "dims": value.dim()}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(each) for each in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(each) for key, each in value.items()}}
    raise TypeError(type(value).__name__)


def _restored(plain: Any, device: torch.device) -> Any:
    """Return the value that ``_plain`` converted; tensors are on ``device``."""
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        value, dtype = _restored(plain["tensor"], device), getattr(torch, plain["dtype"])
        return torch.full((1,) * plain["dims"], value, dtype=dtype, device=device)
    ((kind, content),) = plain.items()
    if kind == "int":
        return int(content)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind == "dict":
        return {key: _restored(each, device) for key, each in content.items()}
    return {"list": list, "tuple": tuple}[kind](_restored(each, device) for each in content)
