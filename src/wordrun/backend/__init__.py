"""Backends: one optimizer step, in parallel. One file and one line in ``TABLE`` each."""

from wordrun.backend.base import TABLE, Backend, Job, StepResult, build

__all__ = ["TABLE", "Backend", "Job", "StepResult", "build"]
