"""The end of what a launch has printed on stderr: which lines a given rank wrote, and which one says why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from wordrun.common.errors import first_line
from wordrun.launch.launchers import LAUNCHERS

# Enough for a launcher's error messages and the tracebacks of a few ranks.
TAIL_BYTES = 65536
LAST_LINES = 15
# torch prefixes each line of a traceback with "[rank3]: ", wordrun only the first with "[rank 3] ".
PREFIX = re.compile(r"\[rank( ?)(\d+)\]")
# Lines printed by launchers, by torch's C++ code about other ranks, and by the shells of ranks that they kill.
OWN_LINES = "|".join(launcher.own_lines for launcher in LAUNCHERS.values() if launcher.own_lines)
OTHERS = re.compile(rf"({OWN_LINES})|\[[WE]\d{{4}} |(Terminated|Killed|Aborted|Segmentation fault)$")


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
