"""Measures the phases of a step without blocking the device."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

LABELS = ("hooks", "data", "forward", "backward", "passes", "communication", "optimizer", "collectives")
"""The phases of a step; in a pipeline, ``passes`` stands for forward and backward."""
Lap = tuple[str, Any, Any]
"""Label, begin and end: seconds on a CPU, otherwise events."""


class StepTimer:
    """Accumulates seconds by label. On an accelerator it records events and waits for them only when read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._laps: list[Lap] = []
        self._kept: list[Lap] | None = None
        self._before = 0
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

        A CPU waits for it, so its time counts as ``communication`` and not in the phase around it. On an accelerator it
        may overlap with computation, so its time is added to ``collectives`` and remains in the phase.
        """
        begin = self._now()
        yield
        self._collectives.append((begin, self._now()))

    def read(self) -> dict[str, float]:
        """Return the seconds under each label since the last ``read``; waits for the device."""
        if self._laps and not self._on_cpu:
            torch.accelerator.synchronize(self.device)
        seconds: dict[str, float] = defaultdict(float)
        for label, begin, end in self._laps:
            seconds[label] += self._seconds(begin, end)
        if self._kept is not None:
            self._kept += self._laps[self._before :]
            self._before = 0
        self._laps.clear()
        return dict(seconds)

    def keep(self) -> None:
        """Also keep the laps from now on, for ``spans``."""
        self._kept, self._zero, self._before = [], self._now(), len(self._laps)

    def spans(self) -> list[tuple[str, float, float]]:
        """Stop keeping laps, wait for the device, and return each lap: label, begin and end [s since ``keep``]."""
        kept, self._kept = [*(self._kept or []), *self._laps[self._before :]], None
        if kept and not self._on_cpu:
            torch.accelerator.synchronize(self.device)
        times = [
            (label, self._seconds(self._zero, begin), self._seconds(self._zero, end)) for label, begin, end in kept
        ]
        return [
            (label, max(0.0, begin), end) for label, begin, end in times if begin <= end
        ]  # other entries only correct a sum

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin if self._on_cpu else begin.elapsed_time(end) / 1000)

    def _now(self) -> Any:
        if self._on_cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event
