"""The wrapper of ``compat`` for torchvision.

Tried with torchvision 0.23 (torch 2.8) and 0.28 (torch 2.13).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from wordrun.common.errors import ConfigError


def torchvision(module: str, user: str) -> Any:
    """Import a module of torchvision, which ``user`` needs.

    Its wheels for CUDA do not find their operators beside a torch for CPUs, and the import of torchvision fails as it
    describes two of them to the compiler. Data and models use neither, so both are declared, and will never be called.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(f"torchvision.{module}")
    except ImportError as error:
        raise ConfigError(
            f"{user} needs torchvision ({error}): pip install 'wordrun[vision]'", page="install.md#extras"
        ) from None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _declared:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declared.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        _declared[0].define(f"{name}() -> ()")  # type: ignore[no-untyped-call]
    return importlib.import_module(f"torchvision.{module}")


_declared: list[torch.library.Library] = []
"""The operators of torchvision that ``torchvision`` has declared; they exist as long as this object."""
