"""Backends take optimizer steps in parallel. Each is a part: a file, its options and a line in ``config/parts.py``."""

from typing import TYPE_CHECKING

from wordrun.common.lazy import offers

if TYPE_CHECKING:
    from wordrun.backend.base import (
        Backend as Backend,
        BackendSpec as BackendSpec,
        StepResult as StepResult,
        build as build,
    )
    from wordrun.backend.compile import prepare as prepare
    from wordrun.backend.torch_backend import TorchBackend as TorchBackend

__getattr__ = offers(
    __name__,
    {
        "wordrun.backend.base": "Backend BackendSpec StepResult build",
        "wordrun.backend.torch_backend": "TorchBackend",
        "wordrun.backend.compile": "prepare",
    },
)
