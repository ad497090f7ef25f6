"""The end of a launch's stderr: which lines a given rank wrote, and whether they show a fault.

A fault is a failure that a relaunch can cure: in nodes, network or launcher, never in the user's program. Of 63
relaunches after arbitrary failures in a series of runs at ALCF, 7 helped; the others repeated an error. So only faults
that the launchers themselves report count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wordrun.common.errors import REQUEUE, first_line
from wordrun.launch.launchers import LAUNCHERS

# Enough for a launcher's error messages and the tracebacks of a few ranks.
TAIL_BYTES = 65536
LAST_LINES = 15
# torch prefixes each line of a traceback with "[rank3]: ", wordrun only the first with "[rank 3] ".
PREFIX = re.compile(r"\[rank( ?)(\d+)\]")
# Lines printed by launchers, by torch's C++ code about other ranks, and by the shells of ranks that they kill.
OWN_LINES = "|".join(launcher.own_lines for launcher in LAUNCHERS.values() if launcher.own_lines)
OTHERS = re.compile(rf"({OWN_LINES})|\[[WE]\d{{4}} |(Terminated|Killed|Aborted|Segmentation fault)$")
# A line's pattern, its meaning, and the group that names the host to leave out (0: none).
PATTERNS: tuple[tuple[str, str, int], ...] = (
    *(fault for launcher in LAUNCHERS.values() for fault in launcher.faults),
    (r"No VNIs available", "the fabric has no free network identifier", 0),
    (r"CXI alloc failed on cxi\d+", "an earlier job has not yet released the fabric's resources", 0),
    (r"address already in use|EADDRINUSE", "the port was taken in the meantime", 0),
)

TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Tail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, chunk: bytes) -> None:
        """Append ``chunk``; only the last bytes are kept."""
        self._bytes += chunk
        del self._bytes[:-TAIL_BYTES]

    def lines(self) -> list[str]:
        """Return the kept lines; for a line that was overwritten, such as a progress bar, only its last state."""
        return [line.rpartition("\r")[2] for line in self._bytes.decode(errors="replace").split("\n") if line.strip()]


def lines_of(rank: int, lines: Iterable[str]) -> list[str]:
    """Return the last ``lines`` that ``rank`` wrote: lines with its prefix, or else without any."""
    own: list[str] = []
    unprefixed: list[str] = []
    block: int | None = None
    for line in lines:
        writer = block
        prefix = PREFIX.match(line)
        if prefix:
            writer = int(prefix[2])
            block = writer if prefix[1] else None
        if writer == rank:
            own.append(line)
        elif writer is None and not OTHERS.match(line):
            unprefixed.append(line)
    return (own or unprefixed)[-LAST_LINES:]


def reason_in(lines: Sequence[str]) -> str:
    """Return the line of a program's output that says why it failed: its last error, or else its last line."""
    own = [line for line in lines if not re.match(f"launch:|{OWN_LINES}", line)]
    errors = [line for line in own if re.search(r"\bERROR\b|Error\b", line)]
    last = [*errors[-1:], *own[-1:], *lines[-1:]]
    return first_line(last[0]) if last else ""


@dataclass(frozen=True)
class Fault:
    """A failure that may not happen again."""

    meaning: str
    line: str
    hosts: tuple[str, ...]
    """Hosts to leave out, as the launcher names them."""


def classify(lines: Iterable[str], status: int) -> Fault | None:
    """Return the fault shown by the last lines of a failed launch; None: a relaunch would only fail again.

    Args:
        lines: what the launcher and the ranks printed last.
        status: exit status; 0, 2 (invalid options) and 75 (a run to resume) are never faults.
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
    """Return whether ``lines`` contain torch's report that rank 0 could not listen on ``port``."""
    return any(TAKEN.search(line) and re.search(rf"\b{port}\b", line) for line in lines)
