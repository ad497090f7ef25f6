"""Where points run at the same time: on disjoint nodes, or on disjoint shares of a node."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wordrun.common.errors import ConfigError
from wordrun.launch import site_files
from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.parser import parse
from wordrun.launch.plan import look_around
from wordrun.launch.request import Ranks
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.schedulers.base import node_count, total_ranks
from wordrun.launch.walltime import MARGIN_S
from wordrun.study.options import LauncherOptions


@dataclass(frozen=True)
class Placement:
    """The nodes, or the share of a node, where one point runs."""

    hosts: tuple[str, ...] = ()
    """Some of the job's nodes; empty: all of them, or this machine."""
    share: int = 0
    shares: int = 1
    """The point gets share number ``share`` (from 0) of ``shares`` equal shares of a node's cores and devices."""
    threads: int | None = None
    """OMP_NUM_THREADS, if the point gets a share of a node."""
    sharing: tuple[str, ...] = ()
    """Arguments that tell the launcher that points share a node."""
    warns: bool = False
    """Whether launch has to warn the ranks before the time limit, since the scheduler does not."""

    @classmethod
    def of(cls, several: Sequence[Placement]) -> Placement:
        """Return the nodes of ``several`` placements as one."""
        return replace(several[0], hosts=tuple(host for each in several for host in each.hosts))

    def words(self, launch: Sequence[str], file: Path) -> list[str]:
        """Return the options ``launch`` and those that start a point here; ``file`` becomes its hostfile, if any.

        Raises:
            OSError: the file cannot be written.
        """
        words = [*(["--walltime-margin", f"{MARGIN_S:g}"] if self.warns else []), *launch]
        if self.hosts:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{host}\n" for host in self.hosts), encoding="utf-8")
            words += ["--hostfile", str(file.absolute())]
        if self.sharing:
            given = parse([*launch, "--", "wordrun"]).launcher_args
            words += ["--launcher-args", shlex.join([*given, *self.sharing])]
        if self.threads:
            words += ["--env", f"OMP_NUM_THREADS={self.threads}"]
        share = (
            [sys.executable, "-m", "wordrun.study.node_share", f"{self.share}/{self.shares}"] if self.shares > 1 else []
        )
        return [*words, "--", *share]


def find(options: LauncherOptions) -> list[Placement]:
    """Return the placements in this job, or on this machine, for points of the same size.

    Args:
        options: the ranks of each point, and how many points may run at the same time.

    Raises:
        ConfigError: not even one point fits.
    """
    try:
        job, _, ranks = look_around(parse([*options.launch(), "--", "wordrun"]))
    except ConfigError as error:
        raise ConfigError(f"a point of this sweep does not fit: {error}") from None
    scheduler = SCHEDULERS[job.inside or job.scheduler]
    by_user = "OMP_NUM_THREADS" in os.environ and not scheduler.has_set("OMP_NUM_THREADS", os.environ)
    return divide(options, job, ranks, threads_given=by_user)


def nodes(launch: Sequence[str]) -> list[Placement]:
    """Return this job's nodes, or this machine, for points that take whole nodes; ``launch``: options of all points."""
    job = look_around(parse([*launch, "--", "wordrun"]))[0]
    hosts = [(host,) for host in job.hosts] if len(job.hosts) > 1 else [()]
    return [Placement(names, warns=_warns(job)) for names in hosts]


def _warns(job: Job) -> bool:
    return not (job.is_local or SCHEDULERS[job.scheduler].sends_warning(Options()))


def look(launch: Sequence[str], *, submit: bool = False) -> Ranks:
    """Return the ranks of a point with the options ``launch``.

    Args:
        launch: options of launch.
        submit: whether the point is to be a job of its own, rather than a part of this one.

    Raises:
        ConfigError: they contradict each other, or ask for more ranks than there can be.
    """
    if not submit:
        return look_around(parse([*launch, "--", "wordrun"]))[2]
    options = parse([*launch, "--submit", "--", "wordrun"])
    site, _ = site_files.find(options.site, socket.gethostname(), os.environ)
    nodes, np = node_count(options, site), total_ranks(options, site)
    return Ranks(tuple(np // nodes + (at < np % nodes) for at in range(nodes)), "as submitted")


def divide(options: LauncherOptions, job: Job, ranks: Ranks, *, threads_given: bool) -> list[Placement]:
    """Return the placements in ``job`` for points with the layout ``ranks``; see ``find``.

    Args:
        options: how many points may run at the same time.
        job: this job, or this machine.
        ranks: the ranks of each point.
        threads_given: whether the user has exported OMP_NUM_THREADS.
    """
    most = options.parallel
    warns = _warns(job)
    if ranks.nodes > 1:
        starts = range(0, len(job.hosts) - ranks.nodes + 1, ranks.nodes)
        hosts_of_each = [job.hosts[start : start + ranks.nodes] for start in starts]
        return [Placement(hosts, warns=warns) for hosts in hosts_of_each[:most]]
    hosts = job.hosts
    slots = min(job.slots) if any(job.devices) or not job.is_local else 1
    shares = max(1, slots // ranks.np)
    if most:
        wanted = -(-most // len(hosts))
        shares = wanted if job.is_local and not any(job.devices) else min(shares, wanted)
    threads = None if threads_given or shares == 1 else max(1, min(job.threads) // shares // ranks.np)
    pairs = [(share, host) for share in range(shares) for host in hosts]
    return [
        Placement(
            () if job.is_local and len(hosts) == 1 else (host,),
            share,
            shares,
            threads,
            SCHEDULERS[job.scheduler].sharing if shares > 1 else (),
            warns,
        )
        for share, host in pairs[:most]
    ]
