"""Profilers: context managers around the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from wordrun.config import ProfilerConfig, PyinstrumentConfig
from wordrun.log import LOGGER


@contextlib.contextmanager
def profiled(cfg: ProfilerConfig, run_dir: Path, rank: int) -> Iterator[None]:
    """Profile the ``with`` block as ``profiler=NAME`` asks, on rank 0; the result lies in run_dir/profile/."""
    if not isinstance(cfg, PyinstrumentConfig) or rank != 0:
        yield
        return
    from pyinstrument import Profiler

    profiler = Profiler(interval=cfg.interval_s)
    try:
        with profiler:
            yield
    finally:
        folder = run_dir / "profile"
        folder.mkdir(exist_ok=True)
        (folder / "pyinstrument.html").write_text(profiler.output_html(), encoding="utf-8")
        (folder / "pyinstrument.txt").write_text(profiler.output_text(unicode=True), encoding="utf-8")
        LOGGER.info("profile: %s", folder / "pyinstrument.html")
