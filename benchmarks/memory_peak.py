"""The peak of a step's allocations on a CPU, which benchmarks and tests compare with the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak(step: Callable[[], Any]) -> int:
    """Return the most bytes that ``step`` had allocated on the CPU at one time, by torch's profiler."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler clears events")  # of torch 2.10; keeping them takes much longer
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    events: list[tuple[int, int]] = []

    def walk(nodes: Any) -> None:
        for node in nodes:
            if node.tag == torch._C._profiler._EventType.Allocation:  # private; tried with torch 2.8 and 2.13
                events.append((node.start_time_ns, node.extra_fields.alloc_size))
            walk(node.children)

    results: Any = profiler.profiler
    walk(results.kineto_results.experimental_event_tree())
    now = most = 0
    for _, size in sorted(events):
        now += size
        most = max(most, now)
    return most
