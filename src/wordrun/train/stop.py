"""Stopping early, at a step that all ranks agree on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

from wordrun.errors import REQUEUE

# How long a signal may wait to be noticed: the ranks compare notes about this often.
AGREE_EVERY_S = 0.5


class StopSignal:
    """Notes SIGINT, SIGTERM and SIGUSR1, so that the run ends after a whole step with its files written.

    Schedulers send the latter two before they end a job. A second SIGINT or SIGTERM after either of them, and a second
    SIGUSR1, act as they always do; SIGUSR1 is a warning, after which SIGTERM still finds the run saving.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.signal: int = 0
        self.every = 1

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Catch the signals for the length of a ``with`` block; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number
            for each in (number,) if number == signal.SIGUSR1 else (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, old[signal.Signals(each)])

        for number in old:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def pace(self, seconds_per_step: float) -> None:
        """Compare notes every so many steps; ``seconds_per_step`` must be the same on every rank."""
        self.every = max(1, int(AGREE_EVERY_S / seconds_per_step))

    def agreed(self, step: int) -> bool:
        """Say whether some rank has seen a signal; every rank must call this before every step."""
        if dist.get_world_size() > 1:
            if step % self.every:
                return False
            seen = torch.tensor(self.signal, device=self.device)
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
            self.signal = int(seen.item())
        return self.signal != 0


class Interrupted(KeyboardInterrupt):
    """A signal ended the run early, after its files were written.

    ``exit_status`` is 75 where the run can be continued and a scheduler has asked for its end, else 128 + signal.
    """

    def __init__(self, number: int, *, saved: bool) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}" + (", saved" if saved else ""))
        self.exit_status = REQUEUE if saved and number != signal.SIGINT else 128 + number
