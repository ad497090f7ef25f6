"""Summarizes a trace of torch.profiler: computing, communicating, both, idle, and where the self time goes."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wordrun.report.templates import render

COMMUNICATION = re.compile(r"nccl|gloo:|mpi:|oneccl|rccl|^c10d::", re.IGNORECASE)
ATTENTION = re.compile(r"attention|flash|fmha", re.IGNORECASE)
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 10

Interval = tuple[float, float]


@dataclass(frozen=True)
class Operation:
    """An operation, or a kernel of a device."""

    name: str
    seconds: float
    """Self time: without the operations that it calls."""
    calls: int


@dataclass(frozen=True)
class TraceSummary:
    """Seconds of the recorded steps; times are shown as shares of them."""

    where: str
    """device or CPU: whose operations these are."""
    steps: int
    seconds: float
    """From the first operation to the last."""
    compute: float
    communication: float
    overlap: float
    """Communication while something was computed, which costs no time."""
    idle: float
    attention: float
    """Time of attention's operations; 0 if it is computed by products and softmax, which are not only attention's."""
    operations: Sequence[Operation]
    """Those with the most self time, longest first."""

    def percentages(self) -> dict[str, float]:
        """Return how the time is divided [%]: computing, both, communicating, idle."""
        parts = {
            "computing": self.compute - self.overlap, "both": self.overlap,
            "communicating": self.communication - self.overlap, "idle": self.idle,
        }  # fmt: skip
        return {name: 100 * seconds / max(self.seconds, 1e-12) for name, seconds in parts.items()}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace, which may be compressed by gzip."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return list(json.loads(text)["traceEvents"])


def summarize(events: Iterable[dict[str, Any]]) -> TraceSummary:
    """Return the summary of the events of a rank's trace; times in a trace are microseconds."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = sum(str(event["name"]).startswith("ProfilerStep#") for event in spans)
    kernels = [event for event in spans if event.get("cat") in ON_DEVICE]
    used = kernels or [
        event for event in spans
        if event.get("cat") == "cpu_op" or (event.get("cat") == "user_annotation" and _communicates(event))
    ]  # fmt: skip
    talk = _union(_interval(event) for event in used if _communicates(event))
    work = _union(interval for events in _by_thread(used).values() for interval in _working(events))
    both = _union([*talk, *work])
    begin, end = (both[0][0], both[-1][1]) if both else (0.0, 0.0)
    compute, communication, busy = map(_length, (work, talk, both))
    own = [each for each in _own_times(used) if not COMMUNICATION.search(each.name)]
    return TraceSummary(
        where="device" if kernels else "CPU", steps=steps, seconds=end - begin, compute=compute,
        communication=communication, overlap=compute + communication - busy, idle=end - begin - busy,
        attention=_length(_union(_interval(event) for event in used if ATTENTION.search(str(event["name"])))),
        operations=own[:SHOWN],
    )  # fmt: skip


def _communicates(event: dict[str, Any]) -> bool:
    return bool(COMMUNICATION.search(str(event["name"])))


def _interval(event: dict[str, Any]) -> Interval:
    """Return the begin and end of an event in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals that cover what ``intervals`` cover, without overlaps and in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _working(events: Iterable[dict[str, Any]]) -> Iterator[Interval]:
    """Yield when a thread works; an operation that contains a blocking collective waits in it."""
    talk = _union(_interval(event) for event in events if _communicates(event))
    for begin, end in _union(_interval(event) for event in events if not _communicates(event)):
        for start, stop in talk[bisect_left(talk, begin, key=lambda each: each[1]) :]:
            if start >= end:
                break
            if start > begin:
                yield begin, start
            begin = max(begin, stop)
        if begin < end:
            yield begin, end


def _by_thread(events: Iterable[dict[str, Any]]) -> dict[tuple[Any, Any], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in events:
        found[event.get("pid"), event.get("tid")].append(event)
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _own_times(events: Iterable[dict[str, Any]]) -> list[Operation]:
    """Return the operations by self time, longest first."""
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for spans in _by_thread(events).values():
        open_: list[tuple[str, float]] = []  # the operations that have begun, outermost first, with their ends
        for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
            name, (begin, end) = str(event["name"]), _interval(event)
            while open_ and open_[-1][1] <= begin:
                open_.pop()
            if open_:
                seconds[open_[-1][0]] -= end - begin  # type: ignore[assignment]
            seconds[name] += end - begin  # type: ignore[assignment]
            calls[name] += 1
            open_.append((name, end))
    return [Operation(name, time, calls[name]) for name, time in seconds.most_common()]


def as_text(summary: TraceSummary) -> str:
    """Return the summary for people to read."""

    def row(name: str, seconds: float) -> str:
        return f"  {name:<42}{1e3 * seconds / max(1, summary.steps):>12.3f}{_percent(seconds, summary):>8}"

    return "\n".join([
        f"{summary.steps} steps, {1e3 * summary.seconds / max(1, summary.steps):.3f} ms each, on the {summary.where}",
        "", f"  {'':<42}{'ms a step':>12}{'share':>8}",
        row("computing", summary.compute), row("communicating", summary.communication),
        row("  hidden behind computing", summary.overlap), row("idle", summary.idle),
        *([row("attention (part of computing)", summary.attention)] if summary.attention else []),
        "", f"  {'operation (self time)':<42}{'ms a step':>12}{'share':>8}{'calls':>8}",
        *(f"{row(each.name[:42], each.seconds)}{each.calls:>8}" for each in summary.operations), "",
    ])  # fmt: skip


def as_html(summary: TraceSummary, title: str) -> str:
    """Return the summary as a page."""
    return render("trace", title=title, summary=summary)


def as_json(summary: TraceSummary) -> str:
    """Return the summary for ``load``."""
    return json.dumps(asdict(summary), indent=1) + "\n"


def load(file: Path) -> TraceSummary | None:
    """Return the summary in a file; None: it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["operations"] = [Operation(**each) for each in content["operations"]]
        return TraceSummary(**content)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _percent(seconds: float, summary: TraceSummary) -> str:
    return f"{100 * seconds / max(summary.seconds, 1e-12):.1f} %"
