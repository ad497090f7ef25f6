"""Logging for many ranks: information from rank 0 alone, warnings from every rank with its number.

Nothing happens at import; ``start`` is called once by whoever owns the process (the command, a Trainer),
and the handle that it returns takes everything back.
"""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.logging import RichHandler

LOGGER = logging.getLogger("wordrun")
WARNINGS = logging.getLogger("py.warnings")  # Python's own, torch's among them
FOR_FILES = {"for_files": True}
# A warning that all ranks have alike, and that one of them may say for all.
FIRST_RANK = {"first_rank": True}
EARLY_RECORDS = 1000


class RankFilter(logging.Filter):
    """Pass everything on rank 0, and warnings and errors with a ``[rank N]`` prefix on the others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether to show ``record``."""
        if self.rank == 0:
            return True
        if record.levelno < logging.WARNING or hasattr(record, "first_rank"):
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
    # srun -u gives ranks a terminal of its own, whoever reads.
    terminal = sys.stdout.isatty() and os.environ.get("WORDRUN_LAUNCHER") != "srun"
    # A pipe or a file is not 80 columns wide: wrapping would break lines that people grep for.
    return Console(force_terminal=None if terminal else False, width=None if terminal else 200, highlight=False)


class RaisingFileHandler(logging.FileHandler):
    """Lets a full disk end the run with an error instead of printing a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise what went wrong, with the name of the file."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and error.filename is None:
            error.filename = self.baseFilename
        raise


class LogHandle:
    """What ``start`` has set up: the screen, and the handlers that ``close`` takes away again."""

    _open: ClassVar[list[LogHandle]] = []
    """Handles that are open now, the newest last: it alone writes to the screen."""
    _before: ClassVar[tuple[int, bool]]
    """The logger's level and propagation before the first was opened."""

    def __init__(self, rank: int, screen: Console) -> None:
        self.rank = rank
        self.screen = screen
        self._handlers: list[logging.Handler] = []
        if not self._open:
            LogHandle._before = (LOGGER.level, LOGGER.propagate)
            LOGGER.setLevel(logging.INFO)
            LOGGER.propagate = False
            logging.captureWarnings(True)
        self._open.append(self)
        # What is said before there is a run directory belongs into its log, too.
        self._early: MemoryHandler | None = MemoryHandler(EARLY_RECORDS, flushLevel=logging.CRITICAL + 1)
        self.add(self._early)

    def add(self, handler: logging.Handler) -> logging.Handler:
        """Send what this rank may say to ``handler``, too."""
        handler.addFilter(RankFilter(self.rank))
        for logger in (LOGGER, WARNINGS):
            logger.addHandler(handler)
        self._handlers.append(handler)
        return handler

    def add_screen(self, handler: logging.Handler) -> None:
        """Send what this rank may say to ``handler``, as long as no newer handle is open."""
        handler.addFilter(lambda record: self._open[-1:] == [self])
        self.add(handler)

    def add_file(self, path: Path) -> logging.Handler:
        """Send what this rank may say to the file at ``path``, too."""
        handler = RaisingFileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
        if self._early is not None:
            self._early.setTarget(handler)
            self.remove(self._early)  # which writes what it holds to its target
            self._early = None
        return self.add(handler)

    def remove(self, handler: logging.Handler) -> None:
        """Undo ``add``."""
        for logger in (LOGGER, WARNINGS):
            logger.removeHandler(handler)
        handler.close()
        self._handlers.remove(handler)

    def close(self) -> None:
        """Remove all handlers; the last handle restores the loggers."""
        for handler in list(self._handlers):
            self.remove(handler)
        if self in self._open:
            self._open.remove(self)
            if not self._open:
                level, LOGGER.propagate = self._before
                LOGGER.setLevel(level)
                logging.captureWarnings(False)


def start(rank: int) -> LogHandle:
    """Send the wordrun logger to the console; return the handle that undoes it.

    On a terminal, records with ``extra=FOR_FILES`` are left out: a progress bar shows the same.
    """
    screen = console()
    handle = LogHandle(rank, screen)
    handler: logging.Handler
    if screen.is_terminal:
        handler = RichHandler(console=screen, show_path=False, log_time_format="[%H:%M:%S]", markup=False)
        handler.addFilter(lambda record: not hasattr(record, "for_files"))
    else:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    handle.add_screen(handler)
    return handle
