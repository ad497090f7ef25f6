"""Failures that a relaunch can cure: those of nodes, network and launcher, never those of the user's program.

Of 63 relaunches after arbitrary failures in a series of runs at ALCF 7 helped; the others repeated a mistake. So only
what the launchers themselves print of such a fault counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from wordrun.errors import REQUEUE
from wordrun.launch.launchers import LAUNCHERS

# A line's pattern, its meaning, and the group that names the host to leave out (0: none).
PATTERNS: tuple[tuple[str, str, int], ...] = (
    *(fault for launcher in LAUNCHERS.values() for fault in launcher.faults),
    (r"No VNIs available", "the fabric has no free network identifier", 0),
    (r"CXI alloc failed on cxi\d+", "an earlier job has not yet released the fabric's resources", 0),
    (r"address already in use|EADDRINUSE", "the port was taken in the meantime", 0),
)

TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """A failure that may not happen again."""

    meaning: str
    line: str
    hosts: tuple[str, ...]
    """Hosts to leave out, as the launcher names them."""


def classify(lines: Iterable[str], status: int) -> Fault | None:
    """Return the fault that the last lines of a failed launch show; None: a relaunch would only repeat it.

    Args:
        lines: what the launcher and the ranks printed last.
        status: exit status; 0, 2 for wrong options, and 75 for a run to be continued are never a fault.
    """
    if status in (0, 2, REQUEUE):
        return None
    first: Fault | None = None
    hosts: list[str] = []
    for line in lines:
        for pattern, meaning, group in PATTERNS:
            match = re.search(pattern, line, re.IGNORECASE)
            if match:
                hosts += [match[group].rstrip(":,.")] if group else []
                first = first or Fault(meaning, line.strip(), ())
                break
    return Fault(first.meaning, first.line, tuple(dict.fromkeys(hosts))) if first else None


def port_taken(lines: Iterable[str], port: int) -> bool:
    """Say whether ``lines`` show that rank 0 could not listen at ``port``, as torch reports it."""
    return any(TAKEN.search(line) and re.search(rf"\b{port}\b", line) for line in lines)
