"""What the tables of parts consist of: a model, backend, optimizer, tracker, ... each by a name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """One part: its options, and the class or function that they configure."""

    options: type[Any]
    """A dataclass with the default, type and documentation of every option."""
    target: str
    """``package.module:Name``; the module is imported when the part is built, and not before."""

    def load(self) -> Any:
        """Return the class or function that ``target`` names."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)
