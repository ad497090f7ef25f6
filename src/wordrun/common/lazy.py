"""Modules that are imported only when a name of theirs is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def attribute(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Return ``name`` from its module, for a package's ``__getattr__`` (PEP 562).

    Args:
        package: the package that offers it.
        name: what is asked for.
        homes: the module of each name that the package offers.

    Raises:
        AttributeError: the package does not offer it.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name]), name)


def load(target: str) -> Any:
    """Return what ``target``, as ``module:name``, names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
