"""srun, SLURM's launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wordrun.common import slurm
from wordrun.common.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher, LauncherSearch, NoLauncherError, find_command, own_bin, rank_command
from wordrun.launch.request import LONGEST, Request
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import fill

# MPI libraries by their version texts, and the types that each supports, the best one first. Builds of MPICH that
# support PMIx name it among their configure options.
LIBRARIES = (
    (r"CRAY MPICH version \S+", ("cray_shasta", "pmi2")),
    (r"Open MPI v?[\d.]+", ("pmix",)),
    (r"MPICH Version:\s*\S+(?=[\s\S]*--with-pmix)", ("pmix", "pmi2")),
    (r"MPICH Version:\s*\S+|MVAPICH\S* Version\s*:\s*\S+|Intel\(R\) MPI Library \S+", ("pmi2",)),
)
# Programs that print the version text of a library without starting MPI.
ASK_PYTHON = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
ASK_LIBRARY = """
import ctypes, sys
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
ctypes.CDLL(sys.argv[1]).MPI_Get_library_version(text, ctypes.byref(length))
print(text.value.decode())
"""
PATIENCE_S = 20


class Choice(NamedTuple):
    """How srun starts MPI."""

    type: str = ""
    """The value of --mpi; empty: leave it to SLURM."""
    why: str = ""
    warning: str = ""
    network: str = ""
    """The value for the variable that ``slurm.NETWORK`` names; empty: leave it to MPICH."""


def choose_mpi_type(srun: str, search: LauncherSearch) -> Choice:
    """Return the --mpi type, why, and what it requires.

    The user's choice (--launcher-args, SLURM_MPI_TYPE) and the site's take precedence, as does SLURM's default if the
    MPI library supports it.
    """
    if any(word.startswith("--mpi") for word in (*search.site.srun_args, *search.options.launcher_args)):
        return Choice(why="--mpi as given")
    env = {**search.env, "PATH": _path(search.env)}
    configured = re.search(r"^MpiDefault\s*=\s*(\w+)", _output(["scontrol", "show", "config"], env), re.MULTILINE)
    default = configured[1] if configured else "none"
    exported = env.get("SLURM_MPI_TYPE", "")
    # In the shell of an interactive step, SLURM itself sets this variable to its default, so that is no user's choice.
    if exported and not (exported == default and "SLURM_STEP_ID" in env):
        return Choice(why=f"SLURM_MPI_TYPE={exported} was exported")
    text, source = _version(search.options.command, env, guess=default == "none")
    found = next(((match[0], types) for name, types in LIBRARIES if (match := re.search(name, text))), None)
    if not found:
        return Choice(why=f"MPI: SLURM's default, {default}; no known MPI library was found")
    library, types = re.sub(r"( version)?\s*:?\s+", " ", found[0], flags=re.IGNORECASE), found[1]
    known = {"none", *(each for _, supported in LIBRARIES for each in supported)}
    if default.partition("_v")[0] in types or default.partition("_v")[0] not in known:
        return Choice("", f"MPI: SLURM's default, {default}; {source} {library}", "", _network(default, text, env))
    listed = re.findall(r"\w+", _output([srun, "--mpi=list"], env))
    chosen = next((each for each in types if each in listed), "")
    if chosen:
        return Choice(chosen, f"--mpi={chosen}: {source} {library}", "", _network(chosen, text, env))
    lacking = f"{source} {library}, which needs --mpi={' or '.join(types)}, but `srun --mpi=list` does not list it"
    return Choice("", lacking, f"{lacking}: each rank of an MPI program will be rank 0 of 1")


def _network(kind: str, version: str, env: Mapping[str, str]) -> str:
    """Return the network library that MPICH has to use with this --mpi type; empty: any, or the user has chosen."""
    return slurm.network(version, env) if kind == "pmi2" else ""


def _path(env: Mapping[str, str]) -> str:
    """Return the PATH that the ranks will have."""
    path = env.get("PATH", os.defpath)
    return path if own_bin() in path.split(os.pathsep) else f"{own_bin()}{os.pathsep}{path}"


def _version(command: Sequence[str], env: Mapping[str, str], *, guess: bool) -> tuple[str, str]:
    """Return the version text of the MPI library that ``command`` loads (empty: none), and how it loads it.

    Args:
        command: a program that is linked with an MPI library, or a Python program, which loads mpi4py's.
        env: its environment.
        guess: whether to assume that any other program, such as a shell script, starts Python.
    """
    program, _ = find_command(command[0], env["PATH"]) if command else ("", "")
    linked = re.search(r"=> (\S*/libmpi\S*)", _output(["ldd", program], env)) if program else None
    if linked:
        return _output([sys.executable, "-c", ASK_LIBRARY, linked[1]], env), f"{command[0]} is linked with"
    python = program if os.path.basename(program).startswith("python") else _interpreter(program)
    if not python and guess:
        python = "python"
    return (_output([python, "-c", ASK_PYTHON], env) if python else ""), f"{os.path.basename(python)} loads"


def _interpreter(program: str) -> str:
    """Return the Python that runs the script ``program``; empty: it is not a Python script."""
    try:
        with open(program, "rb") as file:
            first = file.readline(1000).decode(errors="replace").split()
    except OSError:
        return ""
    return first[-1].removeprefix("#!") if first and first[0].startswith("#!") and "python" in first[-1] else ""


def _output(words: Sequence[str], env: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            words,
            env=dict(env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr  # some versions of srun print to stderr


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
            mpi = choose_mpi_type(path, search)
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
