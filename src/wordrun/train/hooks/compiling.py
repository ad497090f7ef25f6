"""train.compile=auto: compiles the model after some steps, and keeps that if steps are faster."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from statistics import median

import torch

from wordrun.backend.compile import compile_options
from wordrun.backend.torch_backend import TorchBackend
from wordrun.common.errors import ConfigError, first_line
from wordrun.common.log import LOGGER
from wordrun.config.rules import check
from wordrun.dist.collectives import all_max
from wordrun.train.hooks.base import Hook, Training

WARM, STEPS = 3, 5
"""Numbers of warm-up steps and of measured steps, each without and with compilation."""
LEAST_S = 300.0
"""A run with less time left [s] is not compiled: compiling takes up to half a minute, and saves a fifth of the rest."""
FASTER = 0.98
"""Compiled steps must take at most this fraction of the time of uncompiled ones."""


class Compile(Hook):
    """Measures, decides once, and notes the decision in the log, in run.json and in checkpoints.

    All ranks follow rank 0's measurements. A resumed run keeps its earlier decision, so that its losses stay the same.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._since = 0.0

    def at_start(self, trainer: Training) -> None:
        """Continue with an earlier decision, or decide where there is nothing to measure."""
        before, left = trainer.state.compiled, trainer.cfg.train.max_iters - trainer.step
        reason = hindrance(trainer)
        if before is None and left <= 2 * (WARM + STEPS):
            reason = reason or f"{left} steps are too few to gain from it"
        # If one node has no compiler, no rank compiles.
        if self._agree(trainer, bool(reason), any_rank=True):
            self._decide(trainer, False, reason or "another rank cannot compile")
        elif before is not None:
            self._decide(trainer, before, "as decided before the checkpoint")

    def before_step(self, trainer: Training) -> None:
        """Begin to measure."""
        self._since = time.perf_counter()

    def after_step(self, trainer: Training) -> None:
        """Measure the step, and decide after the last one."""
        if trainer.state.compiled is not None:
            return
        trainer.result.loss.item()  # waits for the device
        self._times.append(time.perf_counter() - self._since)
        before = median(self._times[WARM : WARM + STEPS] or [0.0])
        if len(self._times) == WARM + STEPS:
            left = before * (trainer.cfg.train.max_iters - trainer.step)
            if self._agree(trainer, left < LEAST_S):
                self._decide(trainer, False, f"about {left:.0f} s of training are too few to gain from it")
            elif self._agree(trainer, bool(failure := compiler_failure(trainer)), any_rank=True):
                self._decide(trainer, False, failure or "another rank cannot compile")
            else:
                _backend(trainer).compile(on=True)
        elif len(self._times) == 2 * (WARM + STEPS):
            now, cost = median(self._times[-STEPS:]), self._times[WARM + STEPS]
            reason = f"{1000 * now:.3g} ms a step instead of {1000 * before:.3g}, after compiling for {cost:.0f} s"
            self._decide(trainer, self._agree(trainer, now < FASTER * before), reason)

    def _agree(self, trainer: Training, condition: bool, *, any_rank: bool = False) -> bool:
        """Return whether the ``condition`` holds on rank 0, or on ``any_rank``; every rank must call this."""
        mine = condition and (any_rank or trainer.world.rank == 0)
        return bool(all_max(torch.tensor([int(mine)], device=trainer.backend.device)).item())

    def _decide(self, trainer: Training, compiled: bool, reason: str) -> None:
        if compiled or self._times:
            backend = _backend(trainer)
            if not (compiled and self._times):  # compiled after measuring: it is compiled already
                backend.compile(on=compiled)
        trainer.state.remember_compilation(compiled)
        trainer.run.note(compile={"compiled": compiled, "reason": reason})
        LOGGER.info("train.compile=auto: %s (%s)", "compiled" if compiled else "not compiled", reason)


def hindrance(trainer: Training) -> str:
    """Return why this rank cannot compile the model; empty: it can."""
    if not isinstance(trainer.backend, TorchBackend):
        return f"train.backend={trainer.cfg.train.backend} has its own engine"
    try:
        train = replace(trainer.cfg.train, compile=True)
        check(replace(trainer.cfg, train=train), trainer.world.size, trainer.world.per_node)
    except ConfigError as error:
        return first_line(error)
    on_cpu = trainer.backend.device.type == "cpu"
    usual = ("clang++" if sys.platform == "darwin" else "g++",) if on_cpu else ("cc", "gcc", "clang")
    chosen = os.environ.get("CXX" if on_cpu else "CC")
    compilers = (chosen,) if chosen else usual
    return "" if any(map(shutil.which, compilers)) else f"no compiler: {' or '.join(compilers)} is not installed"


def compiler_failure(trainer: Training) -> str:
    """Return why a small function cannot be compiled for the trainer's device; empty: it can."""
    device = trainer.backend.device
    try:
        compiled = torch.compile(lambda x: (x @ x).relu() + 1, options=compile_options(device, trainer.layout))
        compiled(torch.ones(16, 16, device=device))
    except Exception as error:  # of many kinds: a broken compiler, headers that are missing, a full disk
        return f"torch.compile failed: {first_line(error)}"
    return ""


def _backend(trainer: Training) -> TorchBackend:
    assert isinstance(trainer.backend, TorchBackend)
    return trainer.backend
