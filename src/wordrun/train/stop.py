"""Stopping on a signal, at a step that all ranks agree on."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

from wordrun.common import sigint
from wordrun.common.errors import REQUEUE

# The ranks check for each other's signals about this often.
AGREE_EVERY_S = 0.5
# A SIGTERM this soon after the first is the same request. PBS sends it to all processes of a job's session, so a rank
# gets it a second time from mpiexec or from launch.
SAME_S = 1.0


# Takes the place of a signal's number if a hook has failed; greater than all numbers, so that it is their maximum.
HOOK_FAILED = 1000


class StopSignal:
    """Records SIGINT, SIGTERM and SIGUSR1, so that the run ends after a complete step with its files written.

    Schedulers send SIGTERM or SIGUSR1 before they end a job. After SIGINT or SIGTERM, another one of these two has its
    usual effect. SIGUSR1 is a warning: after it, a first SIGTERM still lets the run save, and a second SIGUSR1 has its
    usual effect (wordrun's commands ignore it).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.signal: int = 0

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Catch the signals within a ``with`` block, but only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

        def record(number: int, frame: FrameType | None) -> None:
            self.signal = number
            if number == signal.SIGINT:
                sigint.taken(old[signal.SIGINT])
            for each in (number,) if number == signal.SIGUSR1 else (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, old[signal.Signals(each)])
            if number == signal.SIGTERM:
                first = time.monotonic()
                signal.signal(number, lambda number, frame: again(number, first))

        def again(number: int, first: float) -> None:
            if time.monotonic() - first > SAME_S:
                signal.signal(number, old[signal.SIGTERM])
                signal.raise_signal(number)

        for number in old:
            signal.signal(number, record)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def agreed(self, step: int, seconds_per_step: float | None, *, hook_failed: bool = False) -> bool:
        """Return whether any rank should stop; every rank must call this before every step.

        Args:
            step: optimizer steps so far, the same on every rank.
            seconds_per_step: the mean over all ranks, which sets how often they communicate; None: every step.
            hook_failed: whether a hook of this rank has failed, which stops the run like a signal.
        """
        if hook_failed:
            self.signal = HOOK_FAILED
        if dist.get_world_size() > 1:
            every = 1 if seconds_per_step is None else max(1, int(AGREE_EVERY_S / seconds_per_step))
            if step % every:
                return False
            seen = torch.tensor(self.signal, device=self.device)
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
            self.signal = int(seen.item())
        return self.signal != 0


class Interrupted(KeyboardInterrupt):
    """A signal ended the run early, after its files were written.

    ``exit_status`` is 75 if a scheduler stopped the run and it can be resumed, else 128 + signal.
    """

    def __init__(self, number: int, *, saved: bool) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}" + (", saved" if saved else ""))
        self.exit_status = REQUEUE if saved and number != signal.SIGINT else 128 + number
