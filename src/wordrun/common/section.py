"""The base class of config sections, and helpers for the values of options."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

EXAMPLES = "wordrun.train.examples:ExamplesTask"
"""The task of data that consist of examples with an index: images with their classes, or any map-style dataset."""
TEXT = "wordrun.train.language:LanguageTask"
"""The task of text: language modeling."""


class Freezable:
    """Options that can be assigned until ``frozen`` has copied them."""

    _is_frozen = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an option.

        Raises:
            AttributeError: these options belong to a run, which has been built with them.
        """
        if self._is_frozen:
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be changed to {value!r}: the run has already been built with "
                "these options; change the config before you pass it to the trainer"
            )
        super().__setattr__(name, value)


def frozen(options: Any) -> Any:
    """Return a copy of ``options``, a config or a section of one, whose options cannot be assigned."""
    copied = deepcopy(options)
    pending = [copied]
    while pending:
        each = pending.pop()
        if isinstance(each, Freezable):
            pending += vars(each).values()
            vars(each)["_is_frozen"] = True
        elif isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
    return copied


class Section(Freezable):
    """A section of the config."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options by themselves: a message for each problem, which names a remedy."""
        return []

    def conflicts(self, cfg: Any) -> Iterable[str]:
        """Return where other options in ``cfg``, the complete Config, contradict these: a message for each conflict."""
        return []


def value_text(value: Any) -> str:
    """Return ``value`` as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@cache
def field_types(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def fits(value: Any, kind: Any) -> bool:
    """Return whether ``value``, which was read from JSON, has the type ``kind``; True for types that JSON lacks."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, each) for each in get_args(kind))
    kind = get_origin(kind) or kind
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind or kind not in (bool, int, str, list, dict, type(None))
