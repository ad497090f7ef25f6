"""The options of ``launch``."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
