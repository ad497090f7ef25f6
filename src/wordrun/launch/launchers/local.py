"""No launcher: the command is the only rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from wordrun.common.errors import ConfigError
from wordrun.common.exit_reports import UNFINISHED
from wordrun.launch import processes
from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher, LauncherSearch, reject_cpu_bind
from wordrun.launch.request import Request


class Local(Launcher):
    """One process, started by launch itself."""

    name = "local"
    in_sites = False
    in_between = binds_one = False

    @classmethod
    def is_default(cls, search: LauncherSearch) -> bool:
        """Return whether there is a single process, on this machine."""
        return search.np == 1 and search.job.is_local and len(search.job.hosts) == 1

    @classmethod
    def find(cls, search: LauncherSearch) -> Launcher:
        """Return this launcher; more than one process is an error."""
        if search.np > 1:
            raise ConfigError(f"--launcher local starts one process, not {search.np}: omit it, or omit -n")
        return cls(why="--launcher local" if search.wanted else "a single process needs no mpiexec")

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return the command itself."""
        reject_cpu_bind(request.options, "a single process")
        if request.options.launcher_args:
            raise ConfigError("--launcher-args: a single process is started without a launcher, so leave it out")
        return request.options.command

    def variables(self, request: Request) -> Mapping[str, tuple[str, str]]:
        """Return the variables of rank 0 of 1, which ``rank_env.sh`` sets under other launchers."""
        ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
        ours |= {
            "GROUP_RANK": "0",
            "ROLE_RANK": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        unfinished = (
            f"{request.decided.status_dir}-0",
            "a process of wordrun has a file of this name until it has finished",
        )
        return {**{name: (value, "") for name, value in ours.items()}, UNFINISHED: unfinished}

    def keeps_terminal(self) -> bool:
        """Return whether launch's own input is a terminal."""
        return sys.stdin is not None and sys.stdin.isatty()

    def send(self, number: int, pid: int, job: Job, step: str) -> None:
        """Forward every signal unchanged."""
        processes.send(pid, number, group=not self.keeps_terminal())
