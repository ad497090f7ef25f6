"""Profilers: each measures one rank's part of the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wordrun.config import Config
from wordrun.dist import World
from wordrun.errors import ConfigError
from wordrun.log import LOGGER
from wordrun.registry import part_of


class Profiler:
    """Base class of profilers. It measures nothing and serves as profiler=none."""

    def __init__(self, options: Any, folder: Path, rank: int) -> None:
        self.options, self.folder, self.rank = options, folder, rank

    def start(self) -> None:
        """Start measuring; called before the first step."""

    def step(self) -> None:
        """Record the end of a step."""

    def stop(self) -> None:
        """Stop, and write the result below ``self.folder``."""

    def file(self, name: str) -> Path:
        """Return the path of a file called ``name``, marked with the rank except on rank 0; create its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        return path.with_stem(f"{path.stem}-rank-{self.rank}") if self.rank else path

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
        html = self.file("pyinstrument.html")
        html.write_text(self._sampler.output_html(), encoding="utf-8")
        self.file("pyinstrument.txt").write_text(self._sampler.output_text(unicode=True), encoding="utf-8")
        LOGGER.info("profile: %s", html)


class TorchProfiler(Profiler):
    """Records operators and kernels of a few steps with torch.profiler, and writes a Chrome trace."""

    def start(self) -> None:
        """Start the schedule: wait, warm up, record."""
        from torch.profiler import profile, schedule

        options = self.options
        steps = schedule(wait=options.wait, warmup=options.warmup, active=options.active, repeat=1)
        # Only one cycle is recorded; without acc_events, torch 2.10 warns that it would forget others.
        self._profile = profile(schedule=steps, on_trace_ready=self._write, acc_events=True)
        self._profile.start()

    def step(self) -> None:
        """Advance the schedule."""
        self._profile.step()

    def stop(self) -> None:
        """Stop; a run that ends during recording still writes its trace."""
        self._profile.stop()

    def _write(self, profile: Any) -> None:
        trace = self.file("trace.json")
        profile.export_chrome_trace(str(trace))
        LOGGER.info("profile: %s (for chrome://tracing or ui.perfetto.dev)", trace)


def build(cfg: Config, world: World) -> Profiler:
    """Return this rank's profiler, selected by ``profiler=NAME``.

    Raises:
        ConfigError: profiler.ranks contains a rank that does not exist.
    """
    options = cfg.profiler
    if max(options.ranks, default=0) >= world.size:
        raise ConfigError(f"profiler.ranks={options.ranks} should be below the number of ranks, {world.size}")
    make = part_of("profiler", options).build if world.rank in options.ranks else Profiler
    profiler: Profiler = make(options, Path(cfg.run_dir).resolve() / "profile", world.rank)
    return profiler
