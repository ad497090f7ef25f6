"""Backends take optimizer steps in parallel. Each is a part: a file, its options and a line in ``config/parts.py``."""

from typing import TYPE_CHECKING, Any

from wordrun.common.lazy import attribute

if TYPE_CHECKING:
    from wordrun.backend.base import (
        Backend as Backend,
        BackendSpec as BackendSpec,
        StepResult as StepResult,
        build as build,
    )
    from wordrun.backend.compile import prepare as prepare
    from wordrun.backend.torch_backend import TorchBackend as TorchBackend

__all__ = ["Backend", "BackendSpec", "StepResult", "TorchBackend", "build", "prepare"]


def __getattr__(name: str) -> Any:
    return attribute(
        __name__,
        name,
        {
            "Backend": "wordrun.backend.base",
            "BackendSpec": "wordrun.backend.base",
            "StepResult": "wordrun.backend.base",
            "build": "wordrun.backend.base",
            "TorchBackend": "wordrun.backend.torch_backend",
            "prepare": "wordrun.backend.compile",
        },
    )
