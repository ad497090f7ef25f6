"""What this process waits for: its collectives, as far as torch knows, their groups, and for how long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from wordrun import flight_recorder
from wordrun.dist import stacks

# Ranks reach init_process_group at different times, so they may wait there this many times as long.
START_FACTOR = 5.0
MOST = 20
"""Number of collectives that an answer describes."""


def collectives(size: int) -> dict[str, Any]:
    """Return what a ``hang.Answer`` of one of ``size`` ranks says of collectives: groups, pending, last and recent."""
    records = flight_recorder.flight_records() if is_joined() else []
    last: dict[str, int] = {}
    for record in records:
        last[record["group"]] = max(last.get(record["group"], 0), record["seq"])
    members = flight_recorder.group_members() if records else {}
    named = [({name: record[name] for name in ("group", "seq", "op", "size")}, record["pending"]) for record in records]
    return {
        "groups": {group: spans(members[group], size) for group in last if group in members}, "last": last,
        "pending": [call for call, pending in named if pending][:MOST], "recent": [call for call, _ in named[-MOST:]],
    }  # fmt: skip


def spans(members: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return ``members`` as the first, last and distance of ranges, one as a rule; empty: all ranks."""
    if len(members) == size:
        return []
    distance = members[1] - members[0] if members[1:] else 1
    if [*range(members[0], members[-1] + 1, distance)] == list(members):
        return [(members[0], members[-1], distance)]
    return [(member, member, 1) for member in members]


def is_joined() -> bool:
    """Return whether this process has a torch process group, without importing torch."""
    return bool(getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)())


class Waits:
    """For how many seconds the process has been waiting for others, in calls of torch or mpi4py."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        """By group: how many collectives have begun and ended, and since when."""
        self._call: tuple[Any, float] = None, 0.0
        """The main thread's call of torch.distributed, such as recv, which torch does not count, and since when."""
        self._pulse = stacks.Pulse()

    def __call__(self) -> float:
        """Return the longest time; 0: it is not waiting."""
        now, waited = time.monotonic(), self._pulse()
        if not stacks.mpi_call(stacks.own()):
            waited = 0.0
        # As this keeps the frame, another call has another one.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or stacks.IN_TORCH not in frame.f_code.co_filename:
            self._call = None, now
        elif frame is not self._call[0]:
            self._call = frame, now
        in_call = now - self._call[1]
        if not is_joined():  # it starts, which may take longer
            return max(waited, in_call / START_FACTOR)
        counts = flight_recorder.collective_counts()
        self._seen = {
            group: seen if (seen := self._seen.get(group)) and seen[0] == count else (count, now)
            for group, count in counts.items()
        }
        times = (now - since for (begun, ended), since in self._seen.values() if ended < begun)
        return max(waited, in_call, *times)
