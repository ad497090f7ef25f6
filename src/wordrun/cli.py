"""``wordrun [COMMAND] ...``: the first word chooses a command; without one, ``train`` runs.

A new command is one line in ``COMMANDS``, and a module with ``main(argv) -> int``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from wordrun import dist
from wordrun.common import exit_reports, sigint, suggestions
from wordrun.common.errors import MARK, ConfigError
from wordrun.common.suggestions import nearest
from wordrun.common.version import versions

COMMANDS = {
    "train": ("wordrun.commands.train", "train a model (the default)"),
    "prepare": ("wordrun.commands.prepare", "tokenize a dataset into shards, in parallel"),
    "generate": ("wordrun.commands.generate", "generate text from a trained model"),
    "plan": ("wordrun.commands.plan", "estimate memory under every backend, and recommend one"),
    "ls": ("wordrun.commands.ls", "show the runs below outputs/ as a table"),
    "export": ("wordrun.commands.export", "export a checkpoint to Hugging Face format"),
    "tail": ("wordrun.commands.tail", "follow a run's log"),
    "report": ("wordrun.commands.report", "write a page with a run's curves and facts, or compare runs"),
    "study": ("wordrun.commands.study", "measure how training scales, with table, figure and report"),
    "sweep": ("wordrun.study.sweep", "run every combination of several values, or continue a sweep"),
    "new": ("wordrun.commands.new", "write a project with your own model and data"),
}
"""Maps each command to its module and a line of help, the most frequent ones first."""
FIRST = 5
"""So many commands precede the heading "More" in the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    if argv is None and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        # A time limit's warning must not kill a command that does not handle it, nor a run that has just ended.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if argv is None:
        _leave_mark()
        atexit.register(gc.freeze)  # the exit frees all memory: Python need not search torch for garbage, for 0.4 s
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else ""
    if first in COMMANDS:
        return _run(first, arguments[1:])
    if first in ("-h", "--help"):
        if (second := next(iter(arguments[1:]), "")) in COMMANDS and second != "train":  # train is a config group, too
            return _run(second, ["--help"])
        if not second or second.startswith("-"):
            _print(_overview())
    elif first == "--version":
        _print(versions())
        return 0
    elif first in ("--completion", "--complete"):
        return _complete(first, arguments[1:])
    elif first == "--setup-sh":
        _print(str(_setup_sh()))
        return 0
    elif re.fullmatch(r"[A-Za-z][\w-]*", first):  # neither a flag nor an override
        close = f"{nearest(first, COMMANDS)} (commands: {', '.join(COMMANDS)}; options are KEY=VALUE, see --help)"
        _print(f"unknown command '{first}'{suggestions.command(arguments) or close}", sys.stderr)
        return ConfigError.exit_status
    return _run("train", arguments)


def _leave_mark() -> None:
    """Tell ``launch`` that its command runs wordrun, which it cannot see if the command is the name of a script."""
    if (folder := os.environ.get("WORDRUN_STATUS_DIR")) and os.environ.get("RANK") == "0":
        with contextlib.suppress(OSError):
            Path(folder, MARK).touch()


def _run(name: str, arguments: Sequence[str]) -> int:
    # Import only the module of this command: most need Hydra, and no command should wait for another's imports.
    with sigint.ending_at_once(), exit_reports.unfinished():
        status: int = importlib.import_module(COMMANDS[name][0]).main(arguments)
    return status


def _print(text: str, file: TextIO | None = None) -> None:
    """Print ``text`` on rank 0."""
    if dist.discover_or_exit().rank == 0:
        try:
            print(text, file=file, flush=True)
        except BrokenPipeError:  # wordrun --help | head -1
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _complete(flag: str, words: Sequence[str]) -> int:
    """Print the completions of ``words`` or, with ``--completion SHELL``, the script that asks for them."""
    from wordrun.commands import completion

    if flag == "--complete":
        completion.show(words, {name: summary for name, (_, summary) in COMMANDS.items()})
        return 0
    try:
        _print(completion.script(next(iter(words), "")))
    except ConfigError as error:
        _print(str(error), sys.stderr)
        return error.exit_status
    return 0


def _setup_sh() -> Path:
    """Return the path of the shell helpers: the repository's link to them, or the installed file."""
    package = Path(__file__).parent
    link = package.parents[1] / "bin" / "setup.sh"
    return link if link.exists() else package / "launch" / "setup.sh"


def _overview() -> str:
    lines = [f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items()]
    lines[FIRST:FIRST] = ["More:"]
    title = "wordrun trains language models, image classifiers and your own models."
    usage = "Usage: wordrun [COMMAND] [KEY=VALUE ...]; wordrun COMMAND --help"
    return "\n".join([title, usage, "", *lines, ""])
