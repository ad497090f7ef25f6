"""Measures the phases of a step without blocking the device."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch


class Stopwatch:
    """Accumulates seconds by label. On an accelerator it records events and waits for them only when read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._laps: list[tuple[str, Any, Any]] = []  # label, begin and end: seconds on a CPU, otherwise events
        self.start()

    def start(self) -> None:
        """Start timing; earlier time is not counted."""
        self._collectives: list[tuple[Any, Any]] = []
        self._last = self._now()

    def lap(self, label: str) -> None:
        """Add the time since ``start`` or the last ``lap`` to ``label``."""
        now = self._now()
        self._laps.append((label, self._last, now))
        for begin, end in self._collectives:
            if not self._on_cpu:
                self._laps.append(("collectives", begin, end))
            elif label != "communication":
                self._laps += [("communication", begin, end), (label, end, begin)]
        self._collectives.clear()
        self._last = now

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Measure a collective in the ``with`` block.

        On a CPU, which waits for it, its time is ``communication`` rather than part of the phase around it. On an
        accelerator, where it may be hidden behind computation, it is also added to ``collectives``.
        """
        begin = self._now()
        yield
        self._collectives.append((begin, self._now()))

    def read(self) -> dict[str, float]:
        """Return the seconds under each label since the last ``read``; waits for the device."""
        if self._laps and not self._on_cpu:
            torch.accelerator.synchronize(self._device)
        seconds: dict[str, float] = defaultdict(float)
        for label, begin, end in self._laps:
            seconds[label] += end - begin if self._on_cpu else begin.elapsed_time(end) / 1000
        self._laps.clear()
        return dict(seconds)

    def _now(self) -> Any:
        if self._on_cpu:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
