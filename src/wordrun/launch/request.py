"""What is asked of ``launch`` and of a launcher, and what is decided for it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from wordrun.launch.job import Job
from wordrun.launch.site import UNKNOWN, Site

# Linux starts no program with an argument or variable longer than 128 KiB, which 10,000 host names exceed.
LONGEST = 100_000


@dataclass(frozen=True)
class Options:
    """The values of the command line; None where an option was not given."""

    np: int | None = None
    nodes: int | None = None
    ppn: int | None = None
    hostfile: str | None = None
    site: str | None = None
    scheduler: str | None = None
    launcher: str | None = None
    cpu_bind: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    """NAME, VALUE pairs in the order given; the last one of a name wins."""
    launcher_args: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False
    info: bool = False
    doctor: bool = False
    idle_timeout: float | None = None
    """Seconds without output after which the job is ended."""
    retries: int = 0
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
    walltime_margin: float | None = None
    """Seconds before the walltime ends at which ranks get SIGUSR1; 0: they get none."""
    help: bool = False
    version: bool = False
    command: tuple[str, ...] = ()


def seconds(walltime: str) -> int:
    """Return the seconds of ``[D-]H:MM:SS``.

    Raises:
        ValueError: it is something else.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", walltime)
    if not match:
        raise ValueError("should be H:MM:SS, such as 1:00:00")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + rest


@dataclass(frozen=True)
class Ranks:
    """The ranks and their hosts."""

    layout: tuple[int, ...]
    """Ranks on each of the first hosts of the job."""
    why: str

    @property
    def np(self) -> int:
        """Total number of ranks."""
        return sum(self.layout)

    @property
    def nodes(self) -> int:
        """Number of hosts that have ranks."""
        return len(self.layout)

    @property
    def ppn(self) -> int:
        """Most ranks on a host."""
        return max(self.layout)

    @property
    def even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(self.layout)) == 1


@dataclass(frozen=True)
class Identity:
    """The run's name, and whether it may have a state to resume from."""

    run_id: str
    why: str = ""
    """Where the name comes from; empty: it is new."""
    resume: str = ""
    """Why the ranks should resume (WORDRUN_RESUME=auto); empty: no reason to."""


@dataclass(frozen=True)
class Decided:
    """What is decided once per launch, outside the ranks, because they could not agree on it."""

    launch_id: str
    run: Identity
    port: int
    cwd: str
    status_dir: str
    """Where ranks report a failing exit status; made when the ranks start."""
    own_bin: str
    """Directory of the ``python`` that has wordrun."""
    master_addr: str = ""
    """Name or address of the first of several hosts."""
    master_why: str = ""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of this machine."""
    terminal: str = ""
    """COLUMNSxLINES of the terminal that launch writes to, if it is one."""
    name: str = ""
    """Name of this launch's files under outputs/launches; empty: the run's."""

    def path(self, suffix: str) -> str:
        """Return the path of one of this launch's files."""
        return os.path.join(self.cwd, "outputs", "launches", f"{self.name or self.run.run_id}.{suffix}")

    @property
    def step(self) -> str:
        """The name by which a scheduler knows this launch's step."""
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
    """The environment that is set for the ranks."""
    exported: tuple[str, ...] = ()
    """Names of further variables that the user has exported for the ranks."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that have ranks."""
        return self.job.hosts[: self.ranks.nodes]

    @property
    def devices(self) -> int:
        """Devices of each host, of the one that has the fewest."""
        return min(self.job.devices[: self.ranks.nodes])

    @property
    def hosts_file(self) -> str:
        """Path of the file with these hosts, for launchers that need one."""
        return self.decided.path("hosts")
