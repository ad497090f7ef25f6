"""What the measuring that every run does costs, in CPU time, which other programs on the machine hardly change.

    launch -n 2 python benchmarks/measuring.py

A step: the laps of the stopwatch and the sign of progress for the watch. A line of metrics: two small collectives, and
the scores of ten losses. The watch: its thread, per second.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from wordrun import dist
from wordrun.backend import StepResult
from wordrun.dist import watch
from wordrun.train.metrics import Meter
from wordrun.train.state import TrainState

STEPS = 10
"""Steps for a line of metrics."""


def main() -> None:
    """Print the medians of each rank."""
    with (
        dist.session(device="cpu", hang_s=0) as world,
        contextlib.closing(watch.Watch(world, Path(tempfile.mkdtemp()) / "failures", 120.0)) as watching,
    ):
        meter, state = Meter(torch.device("cpu"), torch.float32, world.size, 64, 1000), TrainState()
        result = StepResult(torch.tensor(2.5), torch.tensor(0.5))

        def step() -> None:
            watch.mark(state.step)
            for label in ("hooks", "data", "forward"):
                meter.clock.lap(label)
            with meter.clock.collective():
                pass
            for label in ("backward", "communication", "optimizer"):
                meter.clock.lap(label)
            state.count_step()
            meter.add(result, 1e-3, 24)

        def line() -> float:
            for _ in range(STEPS):
                step()
            return taken(lambda: meter.line(state))

        steps = statistics.median(taken(step) for _ in range(1000))
        meter.line(state)
        lines = statistics.median(line() for _ in range(300))
        clock = time.pthread_getcpuclockid(watching._thread.ident or 0)
        before, since = time.clock_gettime(clock), time.monotonic()
        time.sleep(5)
        watched = 1e6 * (time.clock_gettime(clock) - before) / (time.monotonic() - since)
        print(
            f"rank {world.rank}: {steps:.1f} us a step, {lines:.0f} us a line (every {STEPS} steps: "
            f"{steps + lines / STEPS:.0f} us a step), and the watch {watched:.0f} us a second",
            flush=True,
        )


def taken(call: Callable[[], object]) -> float:
    """Return the CPU time [us] that ``call`` takes of this thread."""
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e3


if __name__ == "__main__":
    main()
