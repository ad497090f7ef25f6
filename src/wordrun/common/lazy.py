"""Names that a package offers and imports only when they are used (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def attribute(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Return ``name`` from its module.

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
