"""What a step really allocates, to hold the plan against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak(step: Callable[[], Any]) -> int:
    """Return the bytes that ``step`` has allocated on the CPU at most at a time, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events: list[tuple[int, int]] = []

    def walk(nodes: Any) -> None:
        for node in nodes:
            if node.tag == torch._C._profiler._EventType.Allocation:
                events.append((node.start_time_ns, node.extra_fields.alloc_size))
            walk(node.children)

    results: Any = profiler.profiler
    walk(results.kineto_results.experimental_event_tree())
    now = most = 0
    for _, size in sorted(events):
        now += size
        most = max(most, now)
    return most
