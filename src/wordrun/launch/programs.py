"""Programs of this machine: the user's command, and those of this Python environment."""

from __future__ import annotations

import os
import sys

from wordrun.errors import UserError


class CommandError(UserError):
    """The command cannot be started."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def own_bin() -> str:
    """Return the directory of this environment's commands, such as ``launch`` and ``python``."""
    return os.path.join(sys.prefix, "bin")


def is_runnable(path: str) -> bool:
    """Say whether ``path`` is a file that this user may execute."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


def find_command(word: str, path: str) -> tuple[str, str]:
    """Return the file that ``word`` runs, and else a file of that name that is not executable (or two "").

    Args:
        word: first word of the command.
        path: the PATH in which it will be looked for.
    """
    folders = [""] if "/" in word else path.split(os.pathsep)
    files = [os.path.join(folder, word) for folder in folders]
    runnable = next((file for file in files if is_runnable(file)), "")
    plain = next((file for file in [word, *files] if os.path.isfile(file)), "")
    return runnable, plain


def check_command(word: str, path: str) -> None:
    """Raise a CommandError, with the exit status of a shell, where ``word`` cannot be run with this PATH."""
    runnable, plain = find_command(word, path)
    if runnable:
        return
    if not plain:
        directory = " (it is a directory)" if os.path.isdir(word) else ""
        where = "no such file" if "/" in word else "in no directory of PATH"
        raise CommandError(f"{word}: command not found{directory or f': {where}'}", 127)
    if plain.endswith(".py"):
        raise CommandError(f"{word} is not an executable file; did you mean: launch python {word}", 126)
    if "/" in word:
        raise CommandError(f"{word} is not executable: chmod +x {word}", 126)
    raise CommandError(f"{word}: command not found: in no directory of PATH (there is a file {plain}; chmod +x?)", 127)
