"""The schedulers that ``launch`` knows, and the job that this process is part of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from wordrun.common.errors import ConfigError
from wordrun.launch.job import Job, LocalHost, with_hostfile
from wordrun.launch.schedulers.base import NoScheduler, Scheduler
from wordrun.launch.schedulers.pbs import PBS
from wordrun.launch.schedulers.slurm import Slurm
from wordrun.launch.site import UNKNOWN, Site

SCHEDULERS: dict[str, Scheduler] = {each.name: each for each in (PBS(), Slurm(), NoScheduler())}
"""By name, as in --scheduler; jobs are detected in this order."""
SUBMITTERS = {name: each for name, each in SCHEDULERS.items() if each.submitter}
"""Schedulers that accept job scripts."""


def find_job(
    wanted: str | None, env: Mapping[str, str], host: LocalHost, site: Site = UNKNOWN, hostfile: str | None = None
) -> Job:
    """Return the job that ``env`` is part of, or this machine if there is none.

    Args:
        wanted: --scheduler; None: the one whose variable is set.
        env: this process's environment.
        host: this machine.
        site: the cluster.
        hostfile: --hostfile, which replaces the job's hosts.

    Raises:
        ConfigError: a variable or file of the job is missing or cannot be parsed.
    """
    found = [name for name, each in SCHEDULERS.items() if each.variable and env.get(each.variable)]
    scheduler = SCHEDULERS[wanted or next(iter(found), "none")]
    if scheduler.variable and scheduler.name not in found:
        raise ConfigError(
            f"--scheduler {scheduler.name}: {scheduler.variable} is not set, so this is not one of its jobs"
        )
    job = scheduler.read(env, host, site)
    for name in found:
        for cores, why in SCHEDULERS[name].granted(env, host, job.hosts):
            job = job.bounded(cores, why)
    if job.is_local:
        why = "--scheduler none" if wanted else "this machine"
        job = replace(job, inside=next(iter(found), ""), reasons={**job.reasons, "scheduler": why})
    return job if hostfile is None else with_hostfile(job, hostfile, in_job_order=scheduler.numbers_hosts)
