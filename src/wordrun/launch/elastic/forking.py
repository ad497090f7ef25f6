"""What a guardian runs, and which commands it runs in processes that it forks."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from wordrun.launch.launchers.base import find_command, own_bin
from wordrun.launch.plan import LaunchPlan


def setup(plan: LaunchPlan, pipes: str) -> dict[str, Any]:
    """Return what guardians need to know to start ranks; ``pipes`` is the folder of the ranks' own pipes."""
    command, fork = python_command(plan)
    return {
        "command": command, "fork": fork, "imports": fork and not plan.options.no_preimport, "pipes": pipes,
        "wordrun": plan.options.runs_wordrun,
        "restarts": plan.options.retries, "bind": not plan.job.is_local,
    }  # fmt: skip


def python_command(plan: LaunchPlan) -> tuple[list[str], bool]:
    """Return what a forked rank runs, and True; for a command that no fork can run, the command, and False.

    That is a Python script, or a module, of the interpreter that runs ``launch``. Under --hang, a new
    interpreter has to start, because its sitecustomize watches the collectives.
    """
    command = list(plan.options.command)
    program, _ = find_command(command[0], plan.environment(os.environ).get("PATH", os.defpath))
    is_own = bool(program) and os.path.realpath(os.path.dirname(program)) == os.path.realpath(own_bin())
    if not is_own or plan.options.hang is not None:
        return command, False
    if re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        words = command[2:] if command[1:2] == ["-u"] else command[1:]
        runs = words[:1] and (not words[0].startswith("-") or (words[0] == "-m" and len(words) > 1))
        return (words, True) if runs else (command, False)
    with contextlib.suppress(OSError), open(program, "rb") as file:
        first = file.readline(500).strip()
        if first.startswith(b"#!") and os.path.dirname(first[2:]) == os.fsencode(own_bin()):
            return [program, *command[1:]], True
    return command, False
