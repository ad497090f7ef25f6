"""What a launcher is asked to start: the ranks on each host, and what ``launch`` has decided for all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.site import UNKNOWN, Site

# Linux limits each argument and variable to 128 KiB, which 10,000 host names exceed.
LONGEST = 100_000


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
    """The run that a launch belongs to, and whether there may be a checkpoint to resume from."""

    run_id: str
    why: str = ""
    """Where the ID comes from; empty: it is new."""
    resume: str = ""
    """Why the ranks should resume (WORDRUN_RESUME=auto); empty: they need not."""


@dataclass(frozen=True)
class Decided:
    """Values that ``launch`` chooses for all ranks, because the ranks could not agree on them."""

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
