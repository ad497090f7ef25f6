"""User errors: shown as one message without a traceback, each kind with its own exit status."""

import inspect
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# EX_TEMPFAIL in sysexits.h: the run stopped on request and can be resumed.
REQUEUE = 75


class UserError(Exception):
    """Something outside the program is wrong; the message names it, its value and the remedy."""

    exit_status = 1


class ConfigError(UserError, ValueError):
    """The options contradict each other or name something that does not exist; nothing was started."""

    exit_status = 2


class WorldError(UserError):
    """The launcher's variables, MPI and the machine do not agree on who the ranks are."""

    exit_status = 2


class PartError(UserError, RuntimeError):
    """The code of a part raised an exception, which is the cause; the message names the part."""

    def __init__(self, what: str, error: BaseException, code: Any) -> None:
        """Say that ``what`` failed with ``error``, and in which line of the file that defines ``code``."""
        try:
            file = inspect.getsourcefile(code) or ""
        except (TypeError, OSError):  # it has no file
            file = ""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" ({Path(file).name}{f':{lines[-1]}' if lines else ''})" if file else ""
        super().__init__(f"{what}: {type(error).__name__}: {first_line(error)}{where}")
        self.__cause__ = error
        self.file: Path | None = None

    def note(self, file: Path) -> None:
        """Add to the message, once, that the traceback is in ``file``."""
        if self.file is None:
            self.file, self.args = file, (f"{self}; traceback: {file}",)


PAGES = {
    "wordrun.dist.mpi": "dist.md#how-a-process-is-identified",
    "wordrun.dist.world": "dist.md#how-a-process-is-identified",
    "wordrun.train.resume": "checkpoints.md#resuming",
    "wordrun.train.memory": "plan.md#before-every-run",
    "wordrun.launch.freeze": "jobs.md#the-code-that-a-job-runs",
    "wordrun.launch.schedulers": "launch.md#in-a-slurm-or-pbs-job",
    "wordrun.launch.site_files": "launch.md#sites",
    "wordrun.launch.submit": "launch.md#submit",
    "wordrun.project": "extend.md#where-parts-are-found",
    "wordrun.registry": "extend.md#where-parts-are-found",
}
"""The section of docs/ that has more about the errors which a module, or a module of this package, raises."""


def with_page(error: UserError) -> str:
    """Return an error's message and, if a page has more to say than the message, a line that names it."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised = next((name for name in reversed(frames) if name != __name__), "")
    page = next((page for module, page in PAGES.items() if f"{raised}.".startswith(f"{module}.")), "")
    return f"{error}\nmore: docs/{page}" if page else str(error)


def short_lines(message: str, width: int = 120) -> list[str]:
    """Return a message's lines; one longer than ``width`` becomes a line for each part before and after a semicolon."""
    lines = message.splitlines()
    return [part for line in lines for part in (line.replace("; ", "\n  ") if len(line) > width else line).split("\n")]


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean 'x'?" for the known word closest to ``word``, or an empty string."""
    import difflib  # imported here to keep launch fast

    names = list(known)
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean '{prefix}{by_lower[close[0]]}'?" if close else ""


def first_line(error: BaseException | str, most: int = 200) -> str:
    """Return the first line of an error's message, cut to ``most`` characters; if there is no message, its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def unpickling_problem(error: BaseException) -> str:
    """Return why ``torch.load`` refused a file, without torch's advice to load it all the same."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    return f"it contains {refused[1]}, which is code rather than data" if refused else first_line(error)
