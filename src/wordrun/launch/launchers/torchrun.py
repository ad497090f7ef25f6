"""torchrun, which comes with torch."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec

from wordrun.common.errors import ConfigError
from wordrun.launch import processes
from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher, LauncherSearch, NoLauncherError, rank_command, reject_cpu_bind
from wordrun.launch.request import Request


class Torchrun(Launcher):
    """Starts ranks on this host if there is no mpiexec."""

    name = "torchrun"
    restarts_ranks = True
    in_sites = False
    stale = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_",
        "TORCHELASTIC_",
    )
    caveat = "each rank of an MPI program is rank 0 of 1"
    own_module = "torch.distributed.run"
    own_lines = r"[WE]\d{4} "
    # These would kill torchrun and leave the ranks running.
    direct = (signal.SIGUSR1, signal.SIGUSR2)
    death_signal = signal.SIGTERM

    @classmethod
    def find(cls, search: LauncherSearch) -> Launcher:
        """Return this environment's torchrun."""
        if has_torch():
            why = "--launcher torchrun" if search.wanted else "no usable mpiexec"
            return cls(sys.executable, f"{why}; {cls.caveat}")
        why = "torchrun needs torch, which is not installed" if search.wanted else "no mpiexec in PATH, and no torch"
        remedy = "pip install 'wordrun[mpich]' installs an mpiexec"
        raise NoLauncherError(f"no launcher for {search.np} ranks: {why} ({remedy})", page="launch.md#one-machine")

    def send(self, number: int, pid: int, job: Job, step: str) -> None:
        """Forward a signal. Until there are ranks, SIGINT becomes SIGTERM, because torch's imports may swallow it."""
        starting = number == signal.SIGINT and not processes.rank_groups(pid, self.daemons)
        super().send(signal.SIGTERM if starting else number, pid, job, step)

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return torchrun's command line, without elastic restarts."""
        reject_cpu_bind(request.options, "torchrun")
        if request.ranks.nodes > 1:
            remedy = "leave it out for the scheduler's own launcher, or -N 1"
            raise ConfigError(f"--launcher torchrun starts ranks on one host: {remedy}")
        return (
            self.path,
            "-m",
            self.own_module,
            "--nnodes",
            "1",
            "--node-rank",
            "0",
            "--nproc-per-node",
            str(request.ranks.np),
            "--rdzv-backend",
            "static",
            "--max-restarts",
            "0",
            "--master-addr",
            request.env["MASTER_ADDR"],
            "--master-port",
            request.env["MASTER_PORT"],
            *request.options.launcher_args,
            "--no-python",
            *rank_command(request.options),
        )


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None
