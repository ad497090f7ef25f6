"""srun, SLURM's launcher."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from wordrun.common import slurm
from wordrun.common.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.launch.launchers import mpi_type
from wordrun.launch.launchers.base import Launcher, LauncherSearch, NoLauncherError, find_command, rank_command
from wordrun.launch.request import LONGEST, Request
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import fill

LOST = "SLURM lost a node"


@dataclass(frozen=True)
class Srun(Launcher):
    """Starts the ranks as a step of the job."""

    mpi: str = ""
    """The value of --mpi; empty: SLURM's default, or what the user or the site says."""
    network: str = ""
    """The network library that MPICH has to use; empty: any."""
    distribution: str = ""
    """How the submission spreads tasks over nodes (SLURM_DISTRIBUTION); empty: the step inherits nothing."""

    name = "srun"
    scheduler = "slurm"
    site_keys = ("srun_args",)
    stale = ("SLURM_HOSTFILE",)
    own_lines = r"(srun|slurmstepd\S*): "
    faults = (
        (r"srun: error: Node failure on (\S+)", LOST, 1),
        (r"error: .*(?:Unable to contact|Communication connection failure).* ?(?:node|host) (\S+)", LOST, 1),
        (r"CANCELLED AT .* DUE TO NODE FAILURE", LOST, 0),
    )
    death_signal = signal.SIGTERM
    is_step, binds_one = True, False  # a step's only task has all cores
    mpi_remedy = "choose an --mpi type that the library supports (srun --mpi=list): launch --launcher-args --mpi=TYPE"
    cores_remedy = "srun needs -c (SLURM 22.05 and later do not inherit it)"
    devices_remedy = "srun: --gpus-per-node with --gpu-bind=none"
    keep_going = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
    single = ("--overlap",)

    @classmethod
    def find(cls, search: LauncherSearch) -> Launcher:
        """Return the srun in PATH."""
        if search.job.scheduler != cls.scheduler:
            raise ConfigError("--launcher srun: SLURM_JOB_ID is not set; start a job with salloc or sbatch first")
        path, _ = find_command("srun", search.env.get("PATH", ""))
        if path:
            mpi = mpi_type.choose(path, search)
            spread = search.env.get("SLURM_DISTRIBUTION", "")
            why = "--launcher srun" if search.wanted else "SLURM's own, in PATH"
            return cls(path, "; ".join(filter(None, (why, mpi.why))), mpi.warning, mpi.type, mpi.network, spread)
        remedy = "launch outside of it, or use --launcher hydra, openmpi or torchrun"
        raise NoLauncherError(
            f"this is a SLURM job, but there is no srun in PATH (a container often has none): {remedy}"
        )

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return srun's command line."""
        job, options, ranks, site, devices = request.job, request.options, request.ranks, request.site, request.devices
        given = site.srun_args if site.launcher == self.name else ("--gpu-bind=none",)
        own = (word for word in given if devices or not ("gpu" in word or "gres" in word))
        args = tuple(fill(word, devices=devices) for word in own)
        if options.cpu_bind:
            args = (*(word for word in args if not word.startswith("--cpu-bind")), f"--cpu-bind={options.cpu_bind}")
        where: tuple[str, ...] = ("-c", str(self.cores_per_rank(request)))
        mpi = (f"--mpi={self.mpi}",) if self.mpi else ()
        if not ranks.even:  # srun would even the numbers out
            where = (*where, "--distribution=arbitrary")
        else:
            where = (f"--ntasks-per-node={ranks.ppn}", *where)
            if self.distribution.partition(":")[0] not in ("", "*", "block"):
                where = (*where, "--distribution=block")  # the job's would number ranks across nodes
            # srun may take any of the job's nodes; rank 0 must be on the host in MASTER_ADDR.
            if ranks.nodes < len(job.hosts) or options.hostfile or job.partial:
                hosts = ",".join(request.hosts)
                where = (*where, f"--nodelist={hosts if len(hosts) <= LONGEST else request.hosts_file}")
        return (
            self.path,
            "-u",
            "-N",
            str(ranks.nodes),
            "-n",
            str(ranks.np),
            *where,
            *mpi,
            *args,
            "--export=ALL",  # else SLURM_EXPORT_ENV, from sbatch --export, would keep variables from the ranks
            "--kill-on-bad-exit=1",
            "--wait=60",
            "--input=0",
            "--disable-status",
            f"--job-name={request.decided.step}",
            *options.launcher_args,
            *rank_command(options),
        )

    def variables(self, request: Request) -> Mapping[str, tuple[str, str]]:
        """Return the variables that every launcher needs, and those for srun."""
        cores = str(self.cores_per_rank(request))
        why = "the same as -c: SLURM 22.05 to 23.02 read only this variable, and srun fails if they differ"
        pty = "srun -u gives each rank a pseudo-terminal, wherever its output goes"
        ours = {**super().variables(request), "SRUN_CPUS_PER_TASK": (cores, why), "WORDRUN_PTY": ("1", pty)}
        if self.network:
            ours[slurm.NETWORK] = (self.network, "UCX's addresses are too long for SLURM's pmi2: MPI_Init may hang")
        if not request.ranks.even:
            ours["SLURM_HOSTFILE"] = (request.hosts_file, "a line for each rank, for --distribution=arbitrary")
        return ours

    def hosts_text(self, request: Request) -> str:
        """Return a line per host, or per rank if hosts have different numbers of ranks."""
        if request.ranks.even:
            return super().hosts_text(request)
        pairs = zip(request.hosts, request.ranks.layout, strict=True)
        return "".join(f"{host}\n" * ranks for host, ranks in pairs)

    def send(self, number: int, pid: int, job: Job, step: str) -> None:
        """Signal the step: srun itself would answer SIGTERM by killing the ranks at once."""
        SCHEDULERS[self.scheduler].signal_step(job, step, signal.SIGTERM if number == signal.SIGHUP else number)
