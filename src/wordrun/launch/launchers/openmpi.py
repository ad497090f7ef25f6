"""Open MPI's mpirun, up to version 4 (ORTE) and from 5 on (PRRTE)."""

from __future__ import annotations

from wordrun.launch.launchers.base import PASSED_ON, Launcher, mpiexec_command, needs_hosts
from wordrun.launch.request import Request


class OpenMPI(Launcher):
    """To other hosts, mpirun forwards only the variables named by -x."""

    name = "openmpi"
    anywhere = True
    file_names = ("orterun", "prte", "openmpi")
    version_texts = ("Open MPI", "OpenRTE", "PRRTE", "prterun")
    stale = ("OMPI_COMM_WORLD_",)
    host_line = "{host} slots={ranks}\n"
    cores_remedy = "mpirun needs --bind-to none"
    daemons = ("orted", "prted")
    own_lines = "mpirun: |mpiexec: "
    direct = PASSED_ON  # after INT and TERM it would soon kill the ranks

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return mpirun's command line."""
        options, ranks = request.options, request.ranks
        where = ("-N", str(ranks.ppn)) if ranks.even else ()
        where = (*where, "--hostfile", request.hosts_file) if needs_hosts(request) else ()
        # Open MPI's default binds a rank to one core, whatever OMP_NUM_THREADS says.
        binding = ("--bind-to", options.cpu_bind or "none")
        crowd = ("--map-by", "slot:OVERSUBSCRIBE") if ranks.ppn > min(request.job.cores) and not where else ()
        inherited = ("LD_LIBRARY_PATH", "PATH", *request.exported) if where else ()
        # Other names are passed as arguments of env(1).
        names = filter(str.isidentifier, sorted({*request.env, *inherited}))
        exported = [word for name in names for word in ("-x", name)]
        words = (*where, *binding, *crowd, *exported, *options.launcher_args, *mpiexec_command(options))
        return (self.path, "-n", str(ranks.np), *words)
