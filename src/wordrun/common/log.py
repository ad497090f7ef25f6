"""Logging for many ranks: information mostly from rank 0 only, warnings from every rank with its number.

Importing this module does nothing. The owner of the process (the command, a Trainer) calls ``start``, and the
returned handle undoes everything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import textwrap
import time
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console, ConsoleDimensions
from rich.text import Text

LOGGER = logging.getLogger("wordrun")
WARNINGS = logging.getLogger("py.warnings")  # Python's warnings, including torch's
FOR_FILES = {"for_files": True}
# For a warning that is the same on all ranks: only rank 0 logs it.
FIRST_RANK = {"first_rank": True}
# For information that rank 0 does not have.
ANY_RANK = {"any_rank": True}
# For an error that is also printed when the process ends: only log.txt gets it.
LOG_FILE = FIRST_RANK | {"log_file": True}
EARLY_RECORDS = 1000
STYLES = {logging.ERROR: "bold red", logging.WARNING: "yellow"}
"""Styles of levels on a terminal, highest first; other levels are not shown."""


class RankFilter(logging.Filter):
    """Pass everything on rank 0; on the others warnings, errors and ``ANY_RANK``, with a ``[rank N]`` prefix."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show ``record``."""
        if self.rank == 0:
            return True
        if (record.levelno < logging.WARNING and not hasattr(record, "any_rank")) or hasattr(record, "first_rank"):
            return False
        if not getattr(record, "has_rank", False):  # two handlers see the same record
            record.msg = f"[rank {self.rank}] {record.msg}"
            record.has_rank = True
        return True


class LaunchConsole(Console):
    """A console on launch's terminal, whose size may change.

    Args:
        device: the path of the terminal; empty: it is on another host, so its size at the start counts.
        options: of rich's Console.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(**options)
        self._device = device

    @property
    def size(self) -> ConsoleDimensions:
        """The present size, or the one at the start."""
        if self._device:
            with contextlib.suppress(OSError):
                terminal = os.open(self._device, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
                try:
                    found = ConsoleDimensions(*os.get_terminal_size(terminal))
                finally:
                    os.close(terminal)
                if found.width and found.height:  # some terminals do not know it
                    return found
        return super().size

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        self._width, self._height = new


def console() -> Console:
    """Return this process's console, which behaves like ``launch``'s terminal, if there is one.

    Under mpiexec a rank's output is a pipe even if ``launch`` runs in a terminal, so ``launch`` passes the terminal's
    size in ``WORDRUN_TERMINAL=COLUMNSxLINES@HOST:DEVICE``; a rank on that host asks the device for its present size.
    """
    size, _, place = os.environ.get("WORDRUN_TERMINAL", "").partition("@")
    columns, _, lines = size.partition("x")
    if columns.isdigit() and lines.isdigit():
        host, _, device = place.partition(":")
        there = device if host == socket.gethostname() else ""
        return LaunchConsole(there, force_terminal=True, width=int(columns), height=int(lines), highlight=False)
    # Some launchers give each rank a pseudo-terminal, wherever its output goes.
    terminal = sys.stdout.isatty() and "WORDRUN_PTY" not in os.environ
    # In a pipe or a file, wrapping at 80 columns would break lines that people grep for.
    return Console(force_terminal=None if terminal else False, width=None if terminal else 200, highlight=False)


class ScreenHandler(logging.Handler):
    """Prints records on a terminal, above a progress bar if there is one.

    Lines are wrapped between words, but not those that are indented: a command is copied as one line.
    """

    def __init__(self, screen: Console) -> None:
        super().__init__()
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Print ``record``; only the time and the level of a warning or an error are styled."""
        try:
            self._print(record)
        except Exception:  # such as a terminal that cannot show a character, which must not end the run
            self.handleError(record)

    def _print(self, record: logging.LogRecord) -> None:
        style = next((style for level, style in STYLES.items() if record.levelno >= level), "")
        level = f"{record.levelname} " if style else ""
        clock = time.strftime("[%H:%M:%S] ", time.localtime(record.created))
        lines = f"{clock}{level}{self.format(record)}".split("\n")
        text = Text("\n".join(self._wrap(line) for line in lines))
        text.stylize("dim", 0, len(clock))
        text.stylize(style, len(clock), len(clock + level))
        self.screen.print(text, soft_wrap=True)

    def _wrap(self, line: str) -> str:
        if line.startswith("  "):
            return line
        return textwrap.fill(line, self.screen.width, break_long_words=False, break_on_hyphens=False)


class PipeHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints records. If nobody reads them any more, as after ``| head``, the run continues without printing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Send what follows nowhere if the pipe is closed; else print the error."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        else:
            super().handleError(record)


class RaisingFileHandler(logging.FileHandler):
    """Raises write errors, such as a full disk, instead of printing a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise the error, with the name of the file."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and error.filename is None:
            error.filename = self.baseFilename
        raise


class LogHandle:
    """The console and the handlers that ``start`` sets up and ``close`` removes."""

    opened: ClassVar[list[LogHandle]] = []
    """Open handles, newest last; only the newest writes to the screen."""
    _before: ClassVar[tuple[int, bool]]
    """The logger's level and propagation before the first handle was opened."""

    def __init__(self, rank: int, screen: Console) -> None:
        self.rank = rank
        self.screen = screen
        self._handlers: list[logging.Handler] = []
        if not self.opened:
            LogHandle._before = (LOGGER.level, LOGGER.propagate)
            LOGGER.setLevel(logging.INFO)
            LOGGER.propagate = False
            logging.captureWarnings(True)
        self.opened.append(self)
        # Records from before the run directory exists, which belong in its log as well.
        self._early: MemoryHandler | None = MemoryHandler(EARLY_RECORDS, flushLevel=logging.CRITICAL + 1)
        self.add(self._early)

    def add(self, handler: logging.Handler) -> logging.Handler:
        """Also send this rank's records to ``handler``."""
        handler.addFilter(RankFilter(self.rank))
        for logger in (LOGGER, WARNINGS):
            logger.addHandler(handler)
        self._handlers.append(handler)
        return handler

    def add_file(self, path: Path) -> logging.Handler:
        """Also send this rank's records to the file at ``path``, earlier ones included."""
        handler = RaisingFileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
        self.add(handler)  # first, so that ``close`` closes the file even if writing to it fails
        if self._early is not None:
            self._early.setTarget(handler)
            self.remove(self._early)  # flushes its records to the target
            self._early = None
        return handler

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
        if self in self.opened:
            self.opened.remove(self)
            if not self.opened:
                level, LOGGER.propagate = self._before
                LOGGER.setLevel(level)
                logging.captureWarnings(False)


def start(rank: int) -> LogHandle:
    """Send the wordrun logger to the console; return the handle that undoes it.

    A terminal does not show records with ``extra=FOR_FILES``, whose content the progress bar shows.
    """
    screen = console()
    handle = LogHandle(rank, screen)
    handler: logging.Handler
    if screen.is_terminal:
        handler = ScreenHandler(screen)
        handler.addFilter(lambda record: not hasattr(record, "for_files"))
    else:
        handler = PipeHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(lambda record: LogHandle.opened[-1:] == [handle] and not hasattr(record, "log_file"))
    handle.add(handler)
    return handle
