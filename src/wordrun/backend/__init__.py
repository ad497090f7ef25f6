"""Backends take optimizer steps in parallel. Each is one file and one line in ``wordrun.parts``."""

from wordrun.backend.base import Backend, BackendSpec, StepResult, build

__all__ = ["Backend", "BackendSpec", "StepResult", "build"]
