"""The end of what a launch's ranks wrote on stderr, and which of it was one rank's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from wordrun.launch.launchers import LAUNCHERS

# Enough for the faults of a launcher and the tracebacks of some ranks.
TAIL_BYTES = 65536
LAST_LINES = 15
# torch begins each line of a traceback with "[rank3]: ", wordrun the first line of one with "[rank 3] ".
PREFIX = re.compile(r"\[rank( ?)(\d+)\]")
# What launchers print, and the shells of ranks that they end.
OWN_LINES = "|".join(launcher.own_lines for launcher in LAUNCHERS.values() if launcher.own_lines)
OTHERS = re.compile(rf"({OWN_LINES})|(Terminated|Killed)$")


class Tail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, chunk: bytes) -> None:
        """Append ``chunk``; only the last bytes are kept."""
        self._bytes += chunk
        del self._bytes[:-TAIL_BYTES]

    def lines(self) -> list[str]:
        """Return the lines that are kept; of one that was written over and over, such as a progress bar, the last."""
        return [line.rpartition("\r")[2] for line in self._bytes.decode(errors="replace").split("\n") if line.strip()]


def lines_of(rank: int, lines: Iterable[str]) -> list[str]:
    """Return the last of ``lines`` that ``rank`` wrote: those with its prefix, or else those without any."""
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
