"""Where the time of a step goes, without holding up the device."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Adds up seconds by label. On an accelerator it notes events and waits for them only when read."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []
        self._last: float | torch.Event = 0.0

    def start(self) -> None:
        """Begin to count; what went before is left out."""
        self._last = self._now()

    def lap(self, label: str) -> None:
        """Count the time since ``start`` or the last ``lap`` under ``label``."""
        now = self._now()
        if isinstance(now, float) and isinstance(self._last, float):
            self._seconds[label] = self._seconds.get(label, 0.0) + now - self._last
        elif isinstance(now, torch.Event) and isinstance(self._last, torch.Event):
            self._events.append((label, self._last, now))
        self._last = now

    def read(self) -> dict[str, float]:
        """Return the seconds under each label since the last ``read``; waits for the device."""
        if self._events:
            torch.accelerator.synchronize(self._device)
            for label, begin, end in self._events:
                self._seconds[label] = self._seconds.get(label, 0.0) + begin.elapsed_time(end) / 1000
            self._events.clear()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float | torch.Event:
        if self._on_cpu:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
