"""Checks that the states of hooks can be restored from a checkpoint unchanged."""

from __future__ import annotations

import contextlib
import json
from typing import Any


def as_json(state: Any) -> Any:
    """Return ``state``, what a hook's method of this name has returned.

    Raises:
        TypeError: JSON would change it or cannot hold it; the message names the key.
    """
    if problem := _problem(state):
        raise TypeError(problem)
    return state


def _problem(state: Any) -> str:
    with contextlib.suppress(TypeError, ValueError):
        if json.loads(json.dumps(state)) == state:
            return ""
    return _problem_at("state()", state)  # there is none if only a NaN differs from itself


def _problem_at(where: str, value: Any) -> str:
    """Return why JSON would change, or cannot hold, the ``value`` at ``where``; empty: it keeps it."""
    if value is None or isinstance(value, bool | int | float | str):
        return ""
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            return f"{where} has the key {wrong[0]!r}; JSON has only strings as keys"
        inside = (_problem_at(f"{where}[{key!r}]", each) for key, each in value.items())
        return next((problem for problem in inside if problem), "")
    if isinstance(value, list):
        inside = (_problem_at(f"{where}[{number}]", each) for number, each in enumerate(value))
        return next((problem for problem in inside if problem), "")
    kind = type(value).__name__
    if isinstance(value, tuple):
        return f"{where} is a {kind}, which comes back as a list: return a list"
    if hasattr(value, "tolist"):
        return f"{where} is a {kind}, which JSON does not have: return its .tolist()"
    return f"{where} is a {kind}, which JSON does not have: return numbers, strings, lists and dicts"
