"""Questions to git, which change nothing in the repository and end within a time limit."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import NamedTuple

LIMIT_S = 30.0
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables, such as those of git's hooks, by which git would answer for another repository than the folder's."""


class Answer(NamedTuple):
    """What git answers about a folder."""

    text: str = ""
    """The output; empty if the folder is in no repository, if there is no git, or if there is a problem."""
    problem: str = ""
    """Why git does not read the repository, with a remedy."""


def ask(folder: str | os.PathLike[str], *words: str) -> Answer:
    """Return what ``git WORDS`` prints in ``folder``.

    Only commands that take no lock should be asked: with GIT_OPTIONAL_LOCKS=0, ``status`` does not, but ``diff`` and
    ``describe --dirty`` (git 2.39) still lock and write the index, at which a commit of the user's would fail.
    """
    command = ["git", "-C", os.fspath(folder), *words]
    env = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=LIMIT_S,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return Answer(problem=f"git {words[0]} in {folder} has taken over {LIMIT_S:g} s")
    except OSError:
        return Answer()
    if done.returncode and "safe.directory" in done.stderr:
        remedy = f"git config --global --add safe.directory {shlex.quote(os.fspath(folder))}"
        return Answer(problem=f"git does not read {folder}, which belongs to another user; to allow that: {remedy}")
    return Answer("" if done.returncode else done.stdout)


def changed(folder: str | os.PathLike[str]) -> tuple[list[str], str]:
    """Return the tracked files of a repository that differ from its commit, and why that is unknown (else empty)."""
    answer = ask(folder, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no")
    return [entry[3:] for entry in answer.text.split("\0") if entry], answer.problem
