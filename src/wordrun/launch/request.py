"""The options of ``launch``, the decisions made for it, and the resulting request to a launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wordrun.launch.job import Job
from wordrun.launch.site import UNKNOWN, Site

# Linux limits each argument and variable to 128 KiB, which 10,000 host names exceed.
LONGEST = 100_000


@dataclass(frozen=True)
class Options:
    """The command line's options; None if not given."""

    np: int | None = None
    nodes: int | None = None
    ppn: int | None = None
    hostfile: str | None = None
    site: str | None = None
    scheduler: str | None = None
    launcher: str | None = None
    oversubscribe: bool = False
    cpu_bind: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    """(NAME, VALUE) pairs in the order given; the last value of a name wins."""
    launcher_args: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False
    info: bool = False
    doctor: bool = False
    stacks: str | None = None
    """The run whose ranks are asked for their stacks."""
    idle_timeout: float | None = None
    """Seconds without output after which the job is stopped."""
    hang: float | None = None
    """Seconds that ranks wait for other ranks before they report where each is, and the job is stopped."""
    retries: int = 0
    elastic: bool = False
    """Let a guardian on each node start the ranks, and restart them when one is killed."""
    no_preimport: bool = False
    """Let guardians import nothing for the ranks."""
    spare_nodes: int = 0
    submit: bool = False
    walltime: str | None = None
    """H:MM:SS."""
    queue: str | None = None
    account: str | None = None
    job_name: str = "wordrun"
    filesystems: str | None = None
    gpus: int | None = None
    """GPUs per node, for the job script."""
    cores: int | None = None
    """Cores per node, for the job script."""
    chain: int = 1
    no_freeze: bool = False
    """Let the job run the code as it is when the job starts, rather than a copy."""
    walltime_margin: float | None = None
    """How many seconds before the walltime ends ranks get SIGUSR1; 0: never."""
    help: bool = False
    version: bool = False
    typed: tuple[str, ...] = field(default=(), compare=False)
    """The command line's arguments before the command."""
    command: tuple[str, ...] = ()

    @property
    def runs_wordrun(self) -> bool:
        """Whether ``command`` is one of wordrun's."""
        return bool(self._arguments)

    @property
    def trains(self) -> bool:
        """Whether ``command`` is wordrun's training, which saves on SIGUSR1; it would kill most other programs."""
        after = self._arguments[:1]
        return bool(after) and (after[0] in ("", "train", "sweep") or "=" in after[0] or after[0][0] == "-")

    @property
    def sweeps(self) -> bool:
        """Whether ``command`` is a sweep that launches its points itself."""
        words = set(self._arguments)
        plugins = {"hydra/launcher=wordrun", "hydra/sweeper=wordrun_optuna"}
        return self.command_name == "sweep" or bool(words & {"-m", "--multirun"} and words & plugins)

    @property
    def studies(self) -> bool:
        """Whether ``command`` is a study, which launches its points itself."""
        return self.command_name == "study"

    @property
    def launches_points(self) -> bool:
        """Whether ``command`` calls launch itself."""
        return self.sweeps or self.studies

    @property
    def command_name(self) -> str:
        """The word after wordrun in ``command``; empty if there is none."""
        return next(iter(self._arguments), "")

    @property
    def _arguments(self) -> tuple[str, ...]:
        """What follows wordrun in ``command`` ("" if nothing does); empty if it is another command."""
        found = arguments_of_wordrun(self.command)
        return () if found is None else found or ("",)


def arguments_of_wordrun(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return what follows wordrun in ``command``, which starts it as ``wordrun`` or ``python -m wordrun``; None: it
    starts another program. ``python -m wordrun.NAME`` is ``wordrun NAME``.
    """
    program, *rest = command or ("",)
    if os.path.basename(program) == "wordrun":
        return tuple(rest)
    if not re.fullmatch(r"python[\d.]*t?", os.path.basename(program)):
        return None
    words = iter(rest)
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, "")
            continue
        # Several of Python's flags in one word, or one with a value.
        flags = re.fullmatch(r"-(?P<others>[^-cmWX]*)((?P<last>[cmWX])(?P<value>.*))?", word)
        if not flags or word == "-":  # a script, or a program on the standard input
            return None
        value = flags["value"] or (next(words, "") if flags["last"] else "")
        if flags["last"] == "c":
            return None
        if flags["last"] == "m":
            package, _, name = value.partition(".")
            return (*filter(None, [name]), *words) if package == "wordrun" else None
    return None


@dataclass(frozen=True)
class Ranks:
    """The number of ranks on each host."""

    layout: tuple[int, ...]
    """Number of ranks on each of the job's first hosts."""
    why: str

    @property
    def np(self) -> int:
        """Total number of ranks."""
        return sum(self.layout)

    @property
    def nodes(self) -> int:
        """Number of hosts with ranks."""
        return len(self.layout)

    @property
    def ppn(self) -> int:
        """Largest number of ranks on a host."""
        return max(self.layout)

    @property
    def even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(self.layout)) == 1


@dataclass(frozen=True)
class Identity:
    """The run's ID, and whether there may be a checkpoint to resume from."""

    run_id: str
    why: str = ""
    """Where the ID comes from; empty: it is new."""
    resume: str = ""
    """Why the ranks should resume (WORDRUN_RESUME=auto); empty: they need not."""


@dataclass(frozen=True)
class Decided:
    """Values chosen once per launch, outside the ranks, which could not agree on them."""

    launch_id: str
    run: Identity
    port: int
    cwd: str
    folder: str
    """The folder for this launch's record and host file."""
    status_dir: str
    """Folder where ranks report a failing exit status; created when they start."""
    own_bin: str
    """Directory of the ``python`` that can import wordrun."""
    master_addr: str = ""
    """Name or address of the first host, if there are several."""
    master_why: str = ""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of this machine."""
    terminal: str = ""
    """COLUMNSxLINES@HOST:DEVICE of launch's terminal, if it writes to one."""
    name: str = ""
    """Base name of this launch's files; empty: the run's ID."""

    def path(self, suffix: str) -> str:
        """Return the path of one of this launch's files."""
        return os.path.join(self.folder, f"{self.name or self.run.run_id}.{suffix}")

    @property
    def step(self) -> str:
        """The name of this launch's step in the scheduler."""
        return f"wordrun-{self.launch_id}"


@dataclass(frozen=True)
class Request:
    """Everything that determines a launcher's command line."""

    job: Job
    options: Options
    ranks: Ranks
    decided: Decided
    site: Site = UNKNOWN
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set for the ranks."""
    exported: tuple[str, ...] = ()
    """Names of all other variables, for launchers that forward only those they are given."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts with ranks."""
        return self.job.hosts[: self.ranks.nodes]

    @property
    def devices(self) -> int:
        """Devices per host, on the host with the fewest."""
        return min(self.job.devices[: self.ranks.nodes])

    @property
    def hosts_file(self) -> str:
        """Path of the file with these hosts, for launchers that need one."""
        return self.decided.path("hosts")
