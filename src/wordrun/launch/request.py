"""What is asked of a launcher, and what is decided for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.ranks import Ranks
from wordrun.launch.site import UNKNOWN, Site

# Linux starts no program with an argument or variable longer than 128 KiB, which 10,000 host names exceed.
LONGEST = 100_000


@dataclass(frozen=True)
class Decided:
    """What is decided once per launch, outside the ranks, because they could not agree on it."""

    launch_id: str
    run_id: str
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
    run_why: str = ""
    """Why the run is not a new one."""
    resume_why: str = ""
    """Why the ranks should resume the run."""

    def path(self, suffix: str) -> str:
        """Return the path of one of this launch's files."""
        return os.path.join(self.cwd, "outputs", "launches", f"{self.name or self.run_id}.{suffix}")

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
