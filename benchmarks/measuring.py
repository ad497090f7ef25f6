"""The cost of what every run measures: CPU time, and for lines of metrics the time until all ranks have them.

    launch -n 2 python benchmarks/measuring.py

A step: the laps of the stopwatch and the sign of progress for the watch. A line of metrics: one small collective, and
the scores of the losses; ranks begin it together. The watch: its thread, per second.
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
from wordrun.backend.base import StepResult
from wordrun.dist.hang import watch
from wordrun.train.metrics import Meter
from wordrun.train.state import TrainState

INTERVALS = (1, 10)
"""Steps between lines of metrics."""
STEP_S = 0.045
"""Length of a step, for comparison [s]."""


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

        def line(steps: int) -> tuple[float, float]:
            for _ in range(steps):
                step()
            torch.distributed.barrier()
            return taken(lambda: meter.line(state))

        steps = statistics.median(taken(step)[0] for _ in range(1000))
        meter.line(state)
        lines = {every: [line(every) for _ in range(300)] for every in INTERVALS}
        clock = time.pthread_getcpuclockid(watching._thread.ident or 0)
        before, since = time.clock_gettime(clock), time.monotonic()
        time.sleep(5)
        watched = 1e6 * (time.clock_gettime(clock) - before) / (time.monotonic() - since)
        print(
            f"rank {world.rank}: {steps:.1f} us of CPU time per step, and the watch {watched:.0f} us per second",
            flush=True,
        )
        for every, each in lines.items():
            cpu, wall = (statistics.median(times) for times in zip(*each, strict=True))
            share = (steps + wall / every) / (1e4 * STEP_S)
            print(
                f"rank {world.rank}, log_interval={every}: a line takes {wall:.0f} us, {cpu:.0f} of them of CPU time; "
                f"{share:.2f} % of a step of {1000 * STEP_S:.0f} ms",
                flush=True,
            )


def taken(call: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU time of this thread, and the time [us], that ``call`` takes."""
    begin, since = time.thread_time_ns(), time.perf_counter_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e3, (time.perf_counter_ns() - since) / 1e3


if __name__ == "__main__":
    main()
