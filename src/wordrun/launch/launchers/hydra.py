"""Hydra: the mpiexec of MPICH and Intel MPI."""

from __future__ import annotations

import signal
import socket

from wordrun.launch import processes
from wordrun.launch.job import Job, short
from wordrun.launch.launchers.base import STOPPING, Launcher, mpiexec_command, needs_hosts
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
    faults = ((r"^\[mpiexec@\S+\] .*(assert \(!closed\) failed|lost connection)", "mpiexec lost a host", 0),)
    # It returns 255 if one of its proxies fails while it cleans up. If a rank is killed while another reads its memory
    # (errno 3: no such process), MPICH aborts the latter at once, and mpiexec returns its status.
    killed = r"^=   EXIT CODE: 9$|process_vm_readv failed \(errno 3\)$"
    killed_status = int(signal.SIGKILL)
    aborted = r"Abort\(\d+\) on node (\d+) "
    interface_variables = ("HYDRA_IFACE",)
    direct = (signal.SIGUSR2,)  # it forwards INT, TERM and USR1
    may_die_of_input = True
    carries_stdin = False  # it kills ranks that read too slowly
    keep_going = ("-disable-auto-cleanup",)

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return mpiexec's command line."""
        options, ranks = request.options, request.ranks
        binding = ("-bind-to", options.cpu_bind) if options.cpu_bind else ()
        # Inside a scheduler's job, Hydra would otherwise start ranks on the scheduler's hosts.
        where: tuple[str, ...] = ("-rmk", "user", "-launcher", "fork") if request.job.inside else ()
        if needs_hosts(request):
            where = ("-f", request.hosts_file, *(("-ppn", str(ranks.ppn)) if ranks.even else ()))
        return (self.path, "-n", str(ranks.np), *where, *binding, *options.launcher_args, *mpiexec_command(options))

    def send(self, number: int, pid: int, job: Job, step: str) -> None:
        """Forward a signal. If all ranks are on this machine, a signal that stops them is sent to them directly.

        mpiexec loses a signal that arrives while it starts the ranks. Ranks that start after the signal find the file
        ``stopped``.
        """
        here = job.is_local and [short(host) for host in job.hosts] == [short(socket.gethostname())]
        ranks = processes.rank_groups(pid, self.daemons) if here and number in STOPPING else []
        for group in ranks:
            processes.send(group, signal.SIGTERM if number == signal.SIGHUP else number, group=True)
        if not ranks:
            super().send(number, pid, job, step)
