"""Backends: one optimizer step, in parallel. A file and a line in ``config.PARTS`` each."""

from wordrun.backend.base import Backend, BackendSpec, StepResult, build

__all__ = ["Backend", "BackendSpec", "StepResult", "build"]
