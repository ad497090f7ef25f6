"""``launch --elastic``: the launcher starts a guardian on each node, which starts the node's ranks."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.launch.elastic.connections import VARIABLE
from wordrun.launch.job import Job
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.launchers.base import Launcher, find_command, own_bin
from wordrun.launch.launchers.local import Local
from wordrun.launch.options import Options
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.rank_starter import RankStarter
from wordrun.launch.request import Ranks, Request

# A warning of torch's, with its C++ stack, when a rank loses its connection to the store, which ends with rank 0. Under
# guardians the other ranks outlive a killed rank 0, which launch reports itself.
LOST_STORE = (
    r"^(?:\[rank\d+\]:)?\[W[^\n]* TCPStore\.cpp:\d+\] \[c10d\] (?:recv|send)\w* failed on [^\n]*\n"
    r"(?:Exception raised from [^\n]*\n(?:(?:frame #\d+: |<omitting python frames>)[^\n]*\n)*\n?)?"
)


class GuardianStarter(RankStarter):
    """Lets the launcher start a guardian per node, spare nodes included."""

    control = "wordrun.launch.elastic.control:GuardianControl"
    keeps_spare_nodes = True
    uses_rank_env = False
    noise = LOST_STORE

    def check(self, options: Options) -> None:
        """Check the options: --cpu-bind, launchers that restart ranks themselves, and sweeps are not supported."""
        if options.cpu_bind:
            raise ConfigError(f"--cpu-bind {options.cpu_bind}: with --elastic, guardians bind the ranks; leave it out")
        if options.launcher and LAUNCHERS[options.launcher].restarts_ranks:
            raise ConfigError(f"--launcher {options.launcher}: with --elastic, guardians start the ranks; leave it out")
        if options.sweeps:
            raise ConfigError("--elastic: a sweep launches its points itself; use it with the command of a single run")

    def processes(self, options: Options, job: Job, ranks: Ranks) -> int:
        """Return the number of guardians."""
        return min(ranks.nodes + options.spare_nodes, len(job.hosts))

    def launcher(self, found: Launcher) -> Launcher:
        """Return ``SingleGuardian`` for one node."""
        return SingleGuardian(why="a single guardian needs no mpiexec") if isinstance(found, Local) else found

    def request(self, request: Request, launcher: Launcher) -> Request:
        """Return the request for the guardians, without binding: each guardian binds its ranks itself."""
        command = (sys.executable, "-m", "wordrun.launch.elastic.guardian")
        bind = "none" if launcher.binds_one else None
        own = launcher.keep_going if request.options.spare_nodes else ()
        options = replace(
            request.options, command=command, cpu_bind=bind, launcher_args=(*own, *request.options.launcher_args)
        )
        return replace(request, options=options, ranks=Ranks((1,) * len(nodes_of(request)), "a guardian per node"))

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the guardians, which report over a connection instead of WORDRUN_STATUS_DIR.

        WORDRUN_LAYOUT is left out too, because ``rank_env.sh`` starts one guardian per host, whatever its ranks.
        """
        kept = {name: value for name, value in env.items() if name not in ("WORDRUN_STATUS_DIR", "WORDRUN_LAYOUT")}
        return {**kept, VARIABLE: ""}  # its value is known when launch listens

    def described(self, ranks: Ranks, launcher: str) -> str:
        """Return the number of guardians, and what starts them."""
        return f"guardians, started by {launcher}" if ranks.nodes > 1 else "a guardian"

    def note(self, command: str) -> str:
        """Return that guardians start the command."""
        return f"a guardian on each host starts the ranks of: {command}"


class SingleGuardian(Local):
    """The launcher of the guardian of the only node, through which its ranks' exit statuses and output pass."""

    in_between = True

    def variables(self, request: Request) -> Mapping[str, tuple[str, str]]:
        """Return those of every launcher."""
        return Launcher.variables(self, request)

    def keeps_terminal(self) -> bool:
        """Return False: several ranks cannot share a terminal."""
        return False


def nodes_of(request: Request) -> tuple[str, ...]:
    """Return the hosts with guardians: those with ranks, then the spare ones."""
    return request.job.hosts[: request.ranks.nodes + request.options.spare_nodes]


def setup(plan: LaunchPlan, pipes: str) -> dict[str, Any]:
    """Return what guardians need to know to start ranks; ``pipes`` is the folder of the ranks' own pipes."""
    command, fork = python_command(plan)
    return {
        "command": command,
        "fork": fork,
        "imports": fork and not plan.options.no_preimport,
        "pipes": pipes,
        "wordrun": plan.options.runs_wordrun,
        "restarts": plan.options.retries,
        "bind": not plan.job.is_local,
    }


def python_command(plan: LaunchPlan) -> tuple[list[str], bool]:
    """Return what a rank runs, and whether the guardian can fork the rank, which saves the imports.

    A guardian can fork a Python script or module that would run in the interpreter that runs ``launch``; then the words
    begin after the interpreter. For other commands, and under --hang, whose sitecustomize is loaded when an interpreter
    starts, the words are the whole command.
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
