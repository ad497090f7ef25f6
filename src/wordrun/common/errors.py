"""User errors: shown as one message without a traceback, each kind with its own exit status."""

import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

# EX_TEMPFAIL in sysexits.h: the run stopped on request and can be resumed.
REQUEUE = 75
MARK = "wordrun"
"""File that wordrun's commands leave in WORDRUN_STATUS_DIR, so that launch knows that its command runs wordrun."""
SHOWN = 4
"""Number of lines of a part's code that are shown on the screen when the part fails."""
SHOWN_RANGES = 8
"""A message names this many ranges of ranks."""


class UserError(Exception):
    """Something outside the program is wrong; the message names it, its value and the remedy."""

    exit_status = 1
    page = ""
    """The section of docs/ with more details, such as ``site_files.md#site-files``; empty: there are none."""

    def __init__(self, message: object = "", *, page: str = "", cause: BaseException | None = None) -> None:
        """Create an error with this ``message``.

        Args:
            message: what is wrong, and the remedy.
            page: the section of docs/ that says more; empty: the one of the class.
            cause: shown by a traceback, as with ``raise ... from``.
        """
        super().__init__(message)
        self.page = page or self.page
        if cause is not None:
            self.__cause__ = cause


class ConfigError(UserError, ValueError):
    """The options contradict each other or name something that does not exist; nothing was started."""

    exit_status = 2


class WorldError(UserError):
    """The launcher's variables, MPI and the machine do not agree on who the ranks are."""

    exit_status = 2
    page = "dist.md#how-a-process-is-identified"


class OtherRankError(UserError):
    """The error of another rank, which that rank reports itself."""


class PartError(UserError, RuntimeError):
    """The code of a part raised an exception, which is the cause; the message names the part."""

    def __init__(self, what: str, error: BaseException, code: Any) -> None:
        """Say that ``what`` failed with ``error``, and in which line of the package that defines ``code``."""
        try:
            file = inspect.getsourcefile(code) or ""
        except (TypeError, OSError):  # it has no file
            file = ""
        self.frames = _frames_of(error, code, file)
        """The lines of the part that led to the error."""
        name, line = (self.frames[-1].filename, f":{self.frames[-1].lineno}") if self.frames else (file, "")
        where = f" ({Path(name).name}{line})" if name else ""
        super().__init__(f"{what}: {type(error).__name__}: {first_line(error)}{where}")
        self.__cause__ = error
        self.file: Path | None = None

    def note(self, file: Path) -> None:
        """Add to the message, once, that the traceback is in ``file``."""
        if self.file is None:
            self.file, self.args = file, (f"{self}; traceback: {file}",)

    def tracebacks(self) -> str:
        """Return the traceback, for a file."""
        return "".join(traceback.format_exception(self))

    def excerpt(self) -> str:
        """Return the message and, below it, the part's own lines that led to the error."""
        lines = [f"  {Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in self.frames if frame.line]
        return "\n".join([str(self), *lines[-SHOWN:]])


class SeveralPartsError(PartError):
    """Several parts failed."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        """Say what each of ``errors`` says."""
        UserError.__init__(self, "\n".join(map(str, errors)))
        self.errors, self.frames, self.file = errors, [], None

    def tracebacks(self) -> str:
        """Return the tracebacks of all errors."""
        return "\n".join("".join(traceback.format_exception(error)) for error in self.errors)


def raise_all(errors: Sequence[UserError]) -> None:
    """Raise ``errors`` as one, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if any(isinstance(error, PartError) for error in errors):
        raise SeveralPartsError(errors)
    if errors:
        raise ConfigError("\n".join(map(str, errors)))


def _frames_of(error: BaseException, code: Any, file: str) -> list[traceback.FrameSummary]:
    """Return the frames of ``error`` in ``file`` and, if that is not wordrun, in the package that defines ``code``."""
    package = (getattr(code, "__module__", None) or "").partition(".")[0]
    walked = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = traceback.extract_tb(error.__traceback__)
    in_package = [str(frame.f_globals.get("__name__")).partition(".")[0] == package != "wordrun" for frame in walked]
    return [
        each
        for each, inside in zip(found, in_package, strict=False)
        if each.filename == file or (inside and each.filename[:1] != "<")
    ]


def with_page(error: UserError) -> str:
    """Return an error's message and, if a page has more to say than the message, a line that names it."""
    if isinstance(error, PartError):  # its message names the file with the traceback
        return error.excerpt()
    return f"{error}\nmore: docs/{error.page}" if error.page else str(error)


def lines_without_pages(output: str) -> list[str]:
    """Return the lines of a program's output without empty ones, and without those that name a page of docs/."""
    lines = (line.strip() for line in output.splitlines())
    return [line for line in lines if line and not line.removeprefix("launch: ").startswith("more: docs/")]


def show(error: UserError) -> int:
    """Print an error's message, with the page that has more to say, on stderr; return the exit status."""
    print(with_page(error), file=sys.stderr, flush=True)
    return error.exit_status


def short_lines(message: str, width: int = 120) -> list[str]:
    """Return a message's lines; one longer than ``width`` is divided at its semicolons."""
    lines = message.splitlines()
    divided = (line.replace("; ", "\n  ") if len(line) > width else line for line in lines)
    return [each for line in divided for each in line.split("\n")]


def ranges(ranks: Iterable[int]) -> str:
    """Return sorted numbers such as ``0-2, 5``, and only the first few ranges."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    ]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:SHOWN_RANGES]]
    return ", ".join(shown) + (f" and {sum(map(len, runs[SHOWN_RANGES:]))} more" if len(runs) > SHOWN_RANGES else "")


def listed(names: Iterable[str], width: int = 100) -> str:
    """Return ``names`` in parentheses for the end of a message; many names get lines of their own."""
    text = f"({', '.join(names)})"
    if len(text) <= width:
        return f" {text}"
    lines = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="   ", break_on_hyphens=False)
    return "\n".join(["", *lines])


def as_whole(value: str) -> str:
    """Return how to write a ``value`` such as 1e3 for an option that takes whole numbers; empty: it is not whole."""
    try:
        number = float(value)
    except ValueError:
        return ""
    is_whole = abs(number) < 2**53 and number.is_integer()
    return f": write {number:.0f}, without a point or an exponent" if is_whole else ""


def first_line(error: BaseException | str, most: int = 200) -> str:
    """Return the first line of an error's message, cut to ``most`` characters; if there is no message, its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def unpickling_problem(error: BaseException) -> str:
    """Return why ``torch.load`` rejected a file, without torch's advice to load it all the same."""
    rejected = re.search(r"GLOBAL (\S+)", str(error))
    return f"it contains {rejected[1]}, which is code rather than data" if rejected else first_line(error)
