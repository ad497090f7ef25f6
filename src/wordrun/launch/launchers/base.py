"""The interface of launchers, and the search for one on this machine."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from wordrun.common.errors import ConfigError
from wordrun.launch import processes
from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.request import Request
from wordrun.launch.site import Site

RANK_ENV = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank_env.sh")
# Signals that launch forwards to the ranks.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)


class NoLauncherError(ConfigError):
    """This machine does not have the launcher that the job, the site or --launcher needs."""

    page = "launch.md#in-a-slurm-or-pbs-job"


@dataclass(frozen=True)
class Launcher:
    """A program on this machine that starts ranks; each subclass handles one kind.

    The defaults suit an mpiexec.
    """

    path: str = ""
    """The program to run; empty: none."""
    why: str = ""
    """Why it was chosen."""
    note: str = ""
    """A note for the user, printed before the ranks start."""

    name: ClassVar[str]
    scheduler: ClassVar[str] = ""
    """The only scheduler in whose jobs it works; empty: any."""
    anywhere: ClassVar[bool] = False
    """Whether it may be chosen on an unknown machine."""
    restarts_ranks: ClassVar[bool] = False
    """Whether it restarts failed ranks itself."""
    in_sites: ClassVar[bool] = True
    """Whether a site file may name it."""
    site_keys: ClassVar[tuple[str, ...]] = ()
    """Site file keys that only this launcher reads."""
    file_names: ClassVar[tuple[str, ...]] = ()
    """Parts of the real file's name (with a slash: of its path) that identify an mpiexec of this kind."""
    version_texts: ClassVar[tuple[str, ...]] = ()
    """Parts of the output of ``mpiexec --version`` that identify it."""
    caveat: ClassVar[str] = ""
    """A restriction of ranks that it starts, for the message at the start."""
    remedy: ClassVar[str] = ""
    """How to install or load one."""
    mpi_remedy: ClassVar[str] = "for MPI programs, --launcher hydra or openmpi"
    """What to do if MPI programs run as separate ranks 0 of 1 under it."""
    cores_remedy: ClassVar[str] = ""
    """What to do if it limits each rank to one core."""
    devices_remedy: ClassVar[str] = ""
    """How it lets each rank see all devices of its node."""
    binds_one: ClassVar[bool] = True
    """Whether it binds a node's only process to some of the cores by default."""
    stale: ClassVar[tuple[str, ...]] = ()
    """Variables that would mislead another launcher's ranks (NAME_: all with this prefix)."""
    daemons: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of processes between the launcher and its ranks, each in a separate process group."""
    host_line: ClassVar[str] = "{host}\n"
    """A line of its host file; {ranks} stands for the host's number of ranks."""
    own_module: ClassVar[str] = ""
    """The Python module that its processes run, if it is written in Python."""
    own_lines: ClassVar[str] = ""
    """Regular expression for the beginning of its lines on stderr."""
    noise: ClassVar[str] = ""
    """Regular expression for whole lines that it and its MPI print with a failure but that do not explain it."""
    faults: ClassVar[tuple[tuple[str, str, int], ...]] = ()
    """Faults that a relaunch can cure: a line's pattern, its meaning, the group that names the host (0: none)."""
    killed: ClassVar[str] = ""
    """Regular expression for its line about a process killed by SIGKILL, if its exit status may not say so."""
    killed_status: ClassVar[int] = 128 + signal.SIGKILL
    """Its exit status if SIGKILL killed a rank together with the shell that would have reported it."""
    aborted: ClassVar[str] = ""
    """Regular expression for the line in which its MPI says which rank has called MPI_Abort."""
    interface_variables: ClassVar[tuple[str, ...]] = ()
    """Variables that name the network interface through which its daemons communicate."""
    direct: ClassVar[tuple[signal.Signals, ...]] = ()
    """Signals that launch itself sends to the ranks: the launcher would not forward them, or would kill the ranks."""
    may_die_of_input: ClassVar[bool] = False
    """Whether SIGPIPE may kill it if it forwards stdin, or its end, to ranks that have just ended."""
    carries_stdin: ClassVar[bool] = True
    """Whether its stdin reaches rank 0 whole, also on another host."""
    death_signal: ClassVar[signal.Signals] = signal.SIGKILL
    """The signal that it gets when launch is killed: SIGTERM where SIGKILL would leave ranks running."""
    in_between: ClassVar[bool] = True
    """Whether the ranks' output and exit statuses pass through it, rather than reaching launch directly."""
    keep_going: ClassVar[tuple[str, ...]] = ()
    """Arguments with which it leaves the other processes alone when one ends."""
    single: ClassVar[tuple[str, ...]] = ()
    """Arguments for starting a process on a host where it has already started others."""
    is_step: ClassVar[bool] = False
    """Whether the scheduler's daemons start its ranks, so that no rank is its descendant."""

    @classmethod
    def is_default(cls, search: LauncherSearch) -> bool:
        """Return whether this is the default launcher, as in its scheduler's jobs."""
        return search.job.scheduler == cls.scheduler

    @classmethod
    def find(cls, search: LauncherSearch) -> Launcher:
        """Return this machine's launcher of this kind.

        Raises:
            ConfigError: there is none, or it does not support what is requested.
        """
        found, passed_over = search.mpiexec(cls.name)
        if found:
            return found
        raise search.not_found(f"no mpiexec of {cls.name}", passed_over, cls.remedy)

    def argv(self, request: Request) -> tuple[str, ...]:
        """Return the command line that starts the ranks.

        Raises:
            ConfigError: the launcher cannot do what an option asks.
        """
        raise NotImplementedError

    def variables(self, request: Request) -> Mapping[str, tuple[str, str]]:
        """Return the variables that this launcher needs, with their reasons."""
        why = "each rank's exit status is reported here"
        return {"WORDRUN_LAUNCHER_PATH": (self.path, ""), "WORDRUN_STATUS_DIR": (request.decided.status_dir, why)}

    def hosts_text(self, request: Request) -> str:
        """Return the contents of the host file, for a launcher whose command line or variables name it."""
        pairs = zip(request.hosts, request.ranks.layout, strict=True)
        return "".join(self.host_line.format(host=host, ranks=ranks) for host, ranks in pairs)

    def cores_per_rank(self, request: Request) -> int:
        """Return the number of cores per rank; if hosts differ, the smallest."""
        pairs = zip(request.job.threads, request.ranks.layout, strict=False)
        return max(1, min(cores // ranks for cores, ranks in pairs))

    def keeps_terminal(self) -> bool:
        """Return whether the command reads the terminal, as pdb and shells do, and stays in our process group."""
        return False

    def send(self, number: int, pid: int, job: Job, step: str) -> None:
        """Forward a signal to every rank, once; raises OSError or SubprocessError on failure.

        Args:
            number: the signal. SIGHUP becomes SIGTERM: Hydra's mpiexec would exit at once, and its ranks with it.
            pid: the launcher's process.
            job: the scheduler's job.
            step: name of the step, for launchers that start one.
        """
        if number in self.direct:
            for group in processes.rank_groups(pid, self.daemons):
                processes.send(group, number, group=True)
        else:
            processes.send(pid, signal.SIGTERM if number == signal.SIGHUP else number)


def rank_command(options: Options) -> tuple[str, ...]:
    """Return the command that a launcher runs for each rank."""
    return ("/bin/sh", RANK_ENV, *options.command)


def mpiexec_command(options: Options) -> tuple[str, ...]:
    """Return the command that an mpiexec runs for each rank.

    Raises:
        ConfigError: it has an argument ``:``, with which a second program begins for mpiexec.
    """
    if ":" in options.command:
        remedy = "quote the command (sh -c '...') or use --launcher torchrun"
        raise ConfigError(f"the argument ':' in the command would begin a second program for mpiexec: {remedy}")
    return rank_command(options)


def needs_hosts(request: Request) -> bool:
    """Return whether an mpiexec needs a list of hosts; in a scheduler's job it always does."""
    return not request.job.is_local or len(request.job.hosts) > 1 or request.options.hostfile is not None


def reject_cpu_bind(options: Options, what: str) -> None:
    """Raise a ConfigError for --cpu-bind, which ``what`` does not support."""
    if options.cpu_bind:
        raise ConfigError(f"--cpu-bind {options.cpu_bind}: {what} has no CPU binding; use --launcher hydra or openmpi")


@dataclass(frozen=True)
class LauncherSearch:
    """The search for a launcher on this machine."""

    wanted: str | None
    """--launcher."""
    np: int
    env: Mapping[str, str]
    job: Job
    site: Site
    launchers: Mapping[str, type[Launcher]]
    """All launchers by name."""
    options: Options = field(default_factory=Options)

    def mpiexec(self, *names: str) -> tuple[Launcher | None, list[str]]:
        """Return the first mpiexec of one of these kinds, and notes on what was passed over before it.

        A site's own paths come first. In a job, PATH comes before this Python environment, whose mpiexec may not know
        the scheduler's hosts.
        """
        passed_over: list[str] = []
        if self.site.launcher in names:
            for pattern in self.site.launcher_paths:
                for path in filter(is_runnable, sorted(glob.glob(pattern), reverse=True)):
                    return self.launchers[self.site.launcher](path, f"site {self.site.name}: {pattern}"), passed_over
            if self.site.launcher_paths:
                passed_over.append(f"nothing at {', '.join(self.site.launcher_paths)}")
        for path, where in candidates(self.env, own_first=self.job.is_local):
            name, how = flavour(path, self.env, self.launchers)
            if name in names:
                return self.launchers[name](path, "; ".join([f"{name} by {how}", where, *passed_over])), passed_over
            passed_over.append(f"passed over {path} ({name or 'unknown kind'} by {how})")
        return None, passed_over

    def not_found(self, what: str, passed_over: Sequence[str], remedy: str) -> NoLauncherError:
        """Return the error: what is missing, where it was looked for, and how to get it, each on a line."""
        asked = f"--launcher {self.wanted}: " if self.wanted else ""
        lines = [
            f"{asked}{what}: none next to this Python or in PATH",
            *passed_over,
            *([f"remedy: {remedy}"] if remedy else []),
        ]
        return NoLauncherError("\n  ".join(lines))


def own_bin() -> str:
    """Return the directory of this environment's commands, such as ``launch`` and ``python``."""
    return os.path.join(sys.prefix, "bin")


def is_runnable(path: str) -> bool:
    """Return whether ``path`` is a file that this user may execute."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


def find_command(word: str, path: str) -> tuple[str, str]:
    """Return the file that ``word`` runs, and a file of that name that may not be executable ("" if there is none).

    Args:
        word: first word of the command.
        path: the PATH to search.
    """
    folders = [""] if "/" in word else path.split(os.pathsep)
    files = [os.path.join(folder, word) for folder in folders]
    runnable = next((file for file in files if is_runnable(file)), "")
    plain = next((file for file in [word, *files] if os.path.isfile(file)), "")
    return runnable, plain


def candidates(env: Mapping[str, str], *, own_first: bool) -> Iterator[tuple[str, str]]:
    """Yield each mpiexec and where it was found: the environment's own first or last, the others in PATH order."""
    seen: set[str] = set()
    own = [(own_bin(), "next to this python")]
    others = [(folder, "in PATH") for folder in env.get("PATH", "").split(os.pathsep) if folder not in ("", own_bin())]
    for directory, where in own + others if own_first else others + own:
        for name in ("mpiexec", "mpiexec.hydra", "mpirun"):
            path = os.path.join(directory, name)
            if os.path.realpath(path) not in seen and is_runnable(path):
                seen.add(os.path.realpath(path))
                yield path, where


def flavour(path: str, env: Mapping[str, str], launchers: Mapping[str, type[Launcher]]) -> tuple[str, str]:
    """Return the kind of an mpiexec (empty: unknown), and how it was found: by the real file name, else --version."""
    real = os.path.realpath(path)
    for name, launcher in launchers.items():
        if any(part in (real if "/" in part else os.path.basename(real)) for part in launcher.file_names):
            return name, f"its real path {real}"
    try:
        run = subprocess.run(
            [path, "--version"],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__} from --version"
    text = run.stdout + run.stderr
    kinds = (name for name, launcher in launchers.items() if any(part in text for part in launcher.version_texts))
    return next(kinds, ""), "its --version"
