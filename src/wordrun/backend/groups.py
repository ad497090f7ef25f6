"""Saves and restores what an optimizer changes in its parameter groups, such as a count or an estimate of its rate.

A checkpoint has one tensor for each pipeline stage, ``groups.`` and the name of the stage's first parameter, unless no
value has changed: JSON as bytes, with each group's values and the names of its parameters. By these names, a run with
any other layout finds the values of its groups.
"""

from __future__ import annotations

import json
import numbers
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wordrun.common.errors import UserError
from wordrun.dist import torch_private

GROUPS = "groups."
NOT_SAVED = ("params", "param_names", "lr", "lr_ratio")
"""Entries of a group that wordrun or torch sets anew in every run."""
OFF = "or train without checkpoints (train.checkpoint_interval=0)"
Group = dict[str, Any]


class StateError(UserError, TypeError):
    """An optimizer keeps something that a checkpoint cannot hold; the message names the optimizer and what it is."""

    page = "extend.md#an-optimizer"


class GroupValues:
    """Knows which values of an optimizer's groups have changed since it was constructed.

    Args:
        optimizer: the optimizer, before its first step.
        part: what messages call it.
    """

    def __init__(self, optimizer: Optimizer, part: str) -> None:
        self.optimizer, self.part = optimizer, part
        self._initial = [{key: _snapshot(value) for key, value in _own(group)} for group in optimizer.param_groups]

    def changed(self) -> list[dict[str, Any]]:
        """Return for each group the values that have changed, as JSON has them.

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
        """Return what a checkpoint holds, by its name there.

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
        """Restore the values in ``tensors``, those of all stages; the others become what they were at first.

        A group without parameters, or whose parameters are in no stored group, gets the values of the group with its
        number in the stage that had this rank's parameters.

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
        """Give ``group`` the values that it had at first."""
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
    """A value that JSON cannot hold, which may stay as it is."""

    value: Any = field(compare=False)
    identity: int
    version: int


def _snapshot(value: Any) -> Any:
    """Return ``value`` for JSON, or an object by which a change of it is recognized."""
    try:
        return _plain(value)
    except TypeError:
        return _Other(value, id(value), torch_private.version_of(value) if isinstance(value, Tensor) else 0)


def _plain(value: Any) -> Any:
    """Return ``value`` for JSON.

    The length of a number's text does not depend on its value: ranks whose estimates differ must write equal sizes.

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
