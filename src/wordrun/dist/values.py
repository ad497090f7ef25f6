"""Values that ranks send each other, as JSON: reading them runs no code, as unpickling would.

JSON's own values stay as they are. Each other value is an object with one key: "tuple", "dict" or "path", or the module
and name of a dataclass.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from wordrun.config.registry import packages

RESTORE: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "dict": dict, "path": Path}


def dumps(value: Any) -> bytes:
    """Return ``value`` as JSON.

    Args:
        value: numbers, strings and None; lists, tuples and dicts of them; paths; and dataclasses.

    Raises:
        TypeError: it contains something else.
    """
    return json.dumps(_plain(value)).encode()


def loads(data: bytes) -> Any:
    """Return the value that ``dumps`` converted.

    Raises:
        ValueError: it is not such a value, or contains a dataclass that this process does not have.
    """
    return json.loads(data, object_hook=_restored)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [_plain(each) for each in value]}
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        content = [[field.name, _plain(getattr(value, field.name))] for field in fields(value) if field.init]
        return {f"{cls.__module__}:{cls.__qualname__}": content}
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks: {value!r}")


def _restored(found: dict[str, Any]) -> Any:
    ((kind, content),) = found.items()
    if kind in RESTORE:
        return RESTORE[kind](content)
    module, _, name = kind.partition(":")
    if module not in sys.modules and module.partition(".")[0] in ("wordrun", *packages()):
        importlib.import_module(module)
    cls = getattr(sys.modules.get(module), name, None)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise ValueError(f"{kind} is not a dataclass that this process has imported")
    return cls(**dict(content))
