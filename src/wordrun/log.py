"""Logging for many ranks: information from rank 0 alone, warnings from every rank with its number.

Nothing happens at import; ``start`` is called once by whoever owns the process (the command, a Trainer),
and the handle that it returns takes everything back.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

LOGGER = logging.getLogger("wordrun")


class RankFilter(logging.Filter):
    """Pass everything on rank 0, and warnings and errors with a ``[rank N]`` prefix on the others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether to show ``record``."""
        if self.rank == 0:
            return True
        if record.levelno < logging.WARNING:
            return False
        if not getattr(record, "has_rank", False):  # two handlers see the same record
            record.msg = f"[rank {self.rank}] {record.msg}"
            record.has_rank = True
        return True


def console() -> Console:
    """Return the console of this process, drawn as on the terminal of ``launch`` where that is one.

    Under mpiexec a rank's output is a pipe although a person watches it; ``launch`` says so
    by ``WORDRUN_TERMINAL=COLUMNSxLINES``.
    """
    columns, _, lines = os.environ.get("WORDRUN_TERMINAL", "").partition("x")
    if columns.isdigit() and lines.isdigit():
        return Console(force_terminal=True, width=int(columns), height=int(lines), highlight=False)
    # A pipe or a file is not 80 columns wide: wrapping would break lines that people grep for.
    width = None if sys.stdout.isatty() else 200
    return Console(width=width, highlight=False)


class LogHandle:
    """Handlers that were added to the wordrun logger; ``close`` removes them."""

    def __init__(self, handlers: list[logging.Handler], console: Console) -> None:
        self.handlers = handlers
        self.console = console
        self._old = (LOGGER.level, LOGGER.propagate)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        for handler in handlers:
            LOGGER.addHandler(handler)

    def close(self) -> None:
        """Remove the handlers, close their files and restore the logger."""
        for handler in self.handlers:
            LOGGER.removeHandler(handler)
            handler.close()
        self.handlers = []
        LOGGER.setLevel(self._old[0])
        LOGGER.propagate = self._old[1]


def start(rank: int, file: Path | None = None) -> LogHandle:
    """Send the wordrun logger to the console and, on rank 0, to ``file``; return the handle that undoes it."""
    screen = console()
    on_screen: logging.Handler
    if screen.is_terminal:
        on_screen = RichHandler(console=screen, show_path=False, log_time_format="[%H:%M:%S]", markup=False)
    else:
        on_screen = logging.StreamHandler(sys.stdout)
        on_screen.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    handlers = [on_screen]
    if rank == 0 and file is not None:
        in_file = logging.FileHandler(file, encoding="utf-8")
        in_file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
        handlers.append(in_file)
    for handler in handlers:
        handler.addFilter(RankFilter(rank))
    return LogHandle(handlers, screen)
