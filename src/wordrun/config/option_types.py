"""Types of options that cannot be composed, or that a checkpoint cannot hold."""

from __future__ import annotations

import enum
import pathlib
import typing
from typing import Any

CHOICE = "write str, and check the value in problems()"


def problems(cls: type[Any], names: typing.Iterable[str]) -> dict[str, str]:
    """Return why options of the dataclass ``cls`` cannot have their types, and what to write, by their names."""
    try:
        hints = typing.get_type_hints(cls)
    except Exception:  # a name that only a type checker knows
        return {}
    return {name: problem for name in names if name in hints and (problem := _problem(hints[name]))}


def _problem(kind: Any) -> str:
    """Return what is wrong with a type, or with a type in it; empty: nothing."""
    if typing.get_origin(kind) is typing.Literal:
        return f"has the type {str(kind).removeprefix('typing.')}, which options cannot have: {CHOICE}"
    if isinstance(kind, type):
        for base, remedy in (
            (enum.Enum, CHOICE),
            (pathlib.PurePath, "write str, and call Path where it is used"),
            (bytes, "write str"),
        ):
            if issubclass(kind, base):
                return f"has the type {kind.__name__}, which a checkpoint cannot hold: {remedy}"
    return next((found for each in typing.get_args(kind) if (found := _problem(each))), "")
