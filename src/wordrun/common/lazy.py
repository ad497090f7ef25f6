"""Modules that are imported only when a name of theirs is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def offers(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package (PEP 562) that imports each of its modules when a name of it is used.

    Args:
        package: the package.
        modules: the names that the package offers, separated by spaces, by the module that has them.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return attribute


def load(target: str) -> Any:
    """Return what ``target``, as ``module:name``, names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
