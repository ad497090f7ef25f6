"""Profilers: each measures one rank's part of the training loop."""

from __future__ import annotations

import contextlib
import gzip
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wordrun.backend.step_timer import LABELS, StepTimer
from wordrun.common.errors import ConfigError, first_line
from wordrun.common.log import ANY_RANK, LOGGER
from wordrun.config.registry import part_of
from wordrun.config.schema import Config
from wordrun.dist import World, collectives, torch_private

ROWS = 30
"""Number of operations in the summary of a trace."""


class Profiler:
    """Base class of profilers. It measures nothing and serves as profiler=none."""

    def __init__(self, options: Any, folder: Path, rank: int) -> None:
        self.options, self.folder, self.rank = options, folder, rank

    every_rank = False
    """Whether every rank takes part, whatever ``profiler.ranks`` is."""

    def watch(self, clock: StepTimer) -> None:
        """Take note of the clock that measures the phases of a step; called before ``start``."""

    def start(self) -> None:
        """Start measuring; called before the first step."""

    def step(self) -> None:
        """Record the end of a step; every rank calls this after the same steps."""

    def stop(self) -> None:
        """Stop, and write the result below ``self.folder``."""

    def file(self, name: str) -> Path:
        """Return the path of a file called ``name``, marked with the rank except on rank 0; create its folder."""
        self.folder.mkdir(exist_ok=True)  # not the run directory, if that was removed
        path = self.folder / name
        return path.with_stem(f"{path.stem}-rank-{self.rank}") if self.rank else path

    def tell(self, text: str, *values: object) -> None:
        """Log what has been written, on the lowest rank that takes part."""
        if self.rank == min(self.options.ranks, default=0):
            LOGGER.info(text, *values, extra=ANY_RANK)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """In a ``with`` block that writes files, log an error such as a full disk instead of raising it."""
        try:
            yield
        except (OSError, RuntimeError, EOFError, ValueError) as error:  # torch does not say which file
            LOGGER.warning("cannot write the profile to %s: %s; the run continues", self.folder, first_line(error))

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class PyinstrumentProfiler(Profiler):
    """Samples the Python stack of this rank, and writes HTML and text."""

    def start(self) -> None:
        """Start sampling."""
        from pyinstrument import Profiler as Sampler

        self._sampler = Sampler(interval=self.options.interval_s)
        self._sampler.start()

    def stop(self) -> None:
        """Stop, and write the files."""
        self._sampler.stop()
        with self.writing():
            html = self.file("pyinstrument.html")
            html.write_text(self._sampler.output_html(), encoding="utf-8")
            self.file("pyinstrument.txt").write_text(self._sampler.output_text(unicode=True), encoding="utf-8")
            self.tell("profile: %s", html)


class TorchProfiler(Profiler):
    """Records operators and kernels of a few steps with torch.profiler: a Chrome trace, and a table of the slowest."""

    def start(self) -> None:
        """Start the schedule: wait, warm up, record."""
        options = self.options
        self._trace: Path | None = None
        self._profile = scheduled(options, self._write, record_shapes=options.shapes, with_stack=options.stacks)
        self._profile.start()

    def step(self) -> None:
        """Advance the schedule."""
        self._profile.step()

    def stop(self) -> None:
        """Stop, and log how to open the trace; a run that ends during recording has one, too."""
        self._profile.stop()
        if self._trace:
            how = "trace: %s; open it at https://ui.perfetto.dev, or with torch-tb-profiler: tensorboard --logdir %s"
            self.tell(how, self._trace, shlex.quote(str(self._trace.parent)))

    def _write(self, profile: Any) -> None:
        # TensorBoard takes the rank from names of this form; HolisticTraceAnalysis opens a folder of traces alone.
        file = self.folder / "traces" / f"rank-{self.rank}.pt.trace.json.gz"
        with self.writing():
            self.folder.mkdir(exist_ok=True)
            file.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(file))
            self._trace = file
            averages = profile.key_averages()
            where = "device" if any(each.self_device_time_total for each in averages) else "cpu"
            table = averages.table(sort_by=f"self_{where}_time_total", row_limit=ROWS, max_name_column_width=60)
            self.file("summary.txt").write_text(table, encoding="utf-8")


class MemoryProfiler(Profiler):
    """Records who allocates memory during a few steps.

    On CUDA it writes a snapshot for pytorch.org/memory_viz, also when memory runs out; on CPUs a table of operations.
    """

    def start(self) -> None:
        """Start recording."""
        self._steps, self._written = 0, False
        self._on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # by the model, if it is on CUDA
        if self._on_cuda:
            torch_private.record_memory(self.options.entries)
        else:
            self._profile = scheduled(self.options, self._table, profile_memory=True)
            self._profile.start()

    def step(self) -> None:
        """Count a step; write the snapshot after the last step to record."""
        self._steps += 1
        if not self._on_cuda:
            self._profile.step()
        elif self._steps == self.options.wait + self.options.warmup + self.options.active:
            self._snapshot("memory.pickle")

    def stop(self) -> None:
        """Stop recording."""
        if not self._on_cuda:
            self._profile.stop()
            return
        if not self._written:
            self._snapshot("memory.pickle")
        torch_private.record_memory(0)

    def __exit__(self, *error: object) -> None:
        """Stop; if memory has run out, which is the cause of the trainer's error, write what was allocated then."""
        cause = error[1]
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = getattr(cause, "__cause__", None)
        if cause is not None and self._on_cuda:
            self._snapshot("out_of_memory.pickle")
        super().__exit__(*error)

    def _snapshot(self, name: str) -> None:
        self._written = True
        with self.writing():
            file = self.file(name)
            torch_private.dump_memory(file)
            self.tell("memory snapshot: %s (drop it on pytorch.org/memory_viz)", file)

    def _table(self, profile: Any) -> None:
        averages = profile.key_averages(group_by_input_shape=False)
        table = averages.table(sort_by="self_cpu_memory_usage", row_limit=self.options.rows, max_name_column_width=60)
        with self.writing():
            file = self.file("memory.txt")
            file.write_text(table, encoding="utf-8")
            self.tell("memory by operation: %s", file)


class SpansProfiler(Profiler):
    """Records the phases of a step on each rank, and merges the ranks' records into one timeline.

    A rank keeps 12 bytes per phase and step, and only rank 0 collects them.
    """

    every_rank = True

    def watch(self, clock: StepTimer) -> None:
        """Use the trainer's clock."""
        self._clock = clock

    def start(self) -> None:
        """Start counting steps."""
        self._steps, self._written = 0, ""

    def step(self) -> None:
        """Begin to record after ``wait`` steps, and merge after ``active`` more."""
        self._steps += 1
        if self._steps == self.options.wait:
            dist.barrier()  # all ranks' times begin when they leave it
            self._clock.keep()
        elif self._steps == self.options.wait + self.options.active:
            self._merge(self._clock.spans())

    def _merge(self, spans: list[tuple[str, float, float]]) -> None:
        device, ranks = self._clock.device, dist.get_world_size()
        count = int(collectives.all_max(torch.tensor([len(spans)], device=device)))
        mine = torch.full((count, 3), -1.0)
        if spans:
            mine[: len(spans)] = torch.tensor([(LABELS.index(label), begin, end) for label, begin, end in spans])
        mine = mine.to(device)
        everyone = [torch.empty_like(mine) for _ in range(ranks)] if self.rank == 0 else None
        dist.gather(mine, everyone)
        if everyone is not None:
            self._write([each.tolist() for each in everyone])

    def _write(self, everyone: list[list[list[float]]]) -> None:
        chosen = self.options.ranks or range(len(everyone))
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in chosen
        ]
        events = [
            {
                "ph": "X",
                "name": LABELS[int(label)],
                "pid": 0,
                "tid": rank,
                "ts": 1e6 * start,
                "dur": 1e6 * (end - start),
            }
            for rank in chosen
            for label, start, end in everyone[rank]
            if label >= 0
        ]
        with self.writing():
            file = self.file("spans.json.gz")
            file.write_bytes(gzip.compress(json.dumps({"traceEvents": [*names, *events]}).encode()))
            self._written = f"timeline of {len(chosen)} ranks: {file}; open it at https://ui.perfetto.dev"

    def stop(self) -> None:
        """Log how to open the timeline."""
        if self._written:
            LOGGER.info(self._written)


def scheduled(options: Any, on_ready: Callable[[Any], None], **recorded: Any) -> Any:
    """Return a torch.profiler that waits, warms up, and records as ``options`` say, and then calls ``on_ready``."""
    from torch.profiler import profile, schedule

    steps = schedule(wait=options.wait, warmup=options.warmup, active=options.active, repeat=1)
    # Only one cycle is recorded; without acc_events, torch 2.10 warns that it would forget others.
    return profile(schedule=steps, on_trace_ready=on_ready, acc_events=True, **recorded)


def build(cfg: Config, world: World) -> Profiler:
    """Return this rank's profiler, selected by ``profiler=NAME``.

    Raises:
        ConfigError: profiler.ranks contains a rank that does not exist.
    """
    options = cfg.profiler
    if max(options.ranks, default=0) >= world.size:
        raise ConfigError(
            f"profiler.ranks={options.ranks} contains a rank that does not exist: this run has {world.size} ranks, "
            "numbered from 0"
        )
    part = part_of("profiler", options)
    make = part.build if part.load().every_rank or world.rank in options.ranks else Profiler
    profiler: Profiler = make(options, Path(cfg.run_dir).resolve() / "profile", world.rank)
    return profiler
