"""Hydra: the mpiexec of MPICH and Intel MPI."""

from __future__ import annotations

import signal

from wordrun.launch.launchers.base import Launcher, mpiexec_command, needs_hosts
from wordrun.launch.request import Request


class Hydra(Launcher):
    """mpiexec forwards its full environment to the ranks (-genvall is the default)."""

    name = "hydra"
    anywhere = True
    file_names = ("hydra", "mpich")
    version_texts = ("HYDRA", "Intel(R) MPI")
    remedy = "pip install 'wordrun[mpich]'"
    stale = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_", "PMIX_")
    host_line = "{host}:{ranks}\n"
    daemons = ("hydra_", "pmi_proxy")
    own_lines = (
        r"mpiexec: |\[mpiexec@|\[proxy:|={83}$|=   (BAD TERM|PID |EXIT CODE|CLEANING UP|YOU CAN IGNORE)"
        "|YOUR APPLICATION TERMINATED WITH|This typically refers to a problem with|Please see the FAQ page for d"
    )
    noise = (
        r"^.*HYDU_sock_write.*\n|^\[mpiexec@.*\] (Sending|Press) Ctrl-C.*\n"
        r"|^Abort\(\d+\) on node \d+ .*: application called MPI_Abort\(.*\n"
    )
    direct = (signal.SIGUSR2,)  # it forwards INT, TERM and USR1
    may_die_of_input = True

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return mpiexec's command line."""
        options, ranks = request.options, request.ranks
        binding = ("-bind-to", options.cpu_bind) if options.cpu_bind else ()
        # Inside a scheduler's job, Hydra would otherwise start ranks on the scheduler's hosts.
        where: tuple[str, ...] = ("-rmk", "user", "-launcher", "fork") if request.job.inside else ()
        if needs_hosts(request):
            where = ("-f", request.hosts_file, *(("-ppn", str(ranks.ppn)) if ranks.even else ()))
        return (self.path, "-n", str(ranks.np), *where, *binding, *options.launcher_args, *mpiexec_command(options))
