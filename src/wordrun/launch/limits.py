"""Checks how many ranks fit on this machine, and before a job is submitted, what a site and its queues allow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import nearest
from wordrun.launch import sweeps_and_studies
from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.request import Ranks
from wordrun.launch.schedulers.base import Scheduler, node_count, nodes_of_job
from wordrun.launch.site import Site
from wordrun.launch.walltime import seconds

# With more ranks per core than this, ranks would spend most of their time waiting for each other.
PER_CORE = 8
# What a rank needs to import torch and join the others.
RANK_BYTES = 400e6
MOST_NAMED = 3
"""A message suggests at most this many queues."""


def check_crowd(options: Options, job: Job, ranks: Ranks, memory: int | None) -> str:
    """Return a note if ranks share the cores of this machine, or exceed a host's room in a job.

    Args:
        options: the command line.
        job: the hosts.
        ranks: the layout.
        memory: bytes that the ranks may use on this machine; None: unknown, or they are not known to run Python.

    Raises:
        ConfigError: there are too many ranks for the cores or the memory, and --oversubscribe was not given.
    """
    if not job.is_local:
        # Equal slots may be a mere default; PBS tells unequal ones, but not the cores of hosts other than the first.
        rooms = job.slots if len({*job.slots}) > 1 else tuple(map(max, job.slots, job.threads))
        crowded = [each for each in zip(job.hosts, ranks.layout, rooms, strict=False) if each[1] > each[2]]
        if not crowded or any(job.devices):  # ranks that share devices have a note of their own
            return ""
        (host, n, room), *others = crowded
        more = f" (and on {len(others)} other host{'s' * (len(others) > 1)})" if others else ""
        return f"{n} ranks on {host}{more}, where the job has room for {room}: they share cores, so all may be slow"
    n, cores = max(zip(ranks.layout, job.cores, strict=False), key=lambda pair: pair[0] / pair[1])
    have = f"{cores} core{'s' * (cores > 1)}"
    by_cores, by_memory = PER_CORE * cores, n if memory is None else int(memory / RANK_BYTES)
    if n > 1 and n > min(by_cores, by_memory) and not options.oversubscribe:
        problem = f"{n} ranks on {have} are more than {PER_CORE} per core"
        if by_memory < by_cores and memory is not None:
            need = f"about {n * RANK_BYTES / 1e9:.1f} GB of memory to import torch"
            problem = f"{n} ranks need {need}, and {memory / 1e9:.1f} GB are available"
        fits = f"{'-n' if options.np and ranks.nodes == 1 else '--ppn'} {max(1, min(by_cores, by_memory))}"
        raise ConfigError(
            f"{ranks.why}: {problem}; {fits} would fit, or --oversubscribe starts them anyway",
            page="launch.md#one-machine",
        )
    return f"{n} ranks share {have}: fine for a test, slow for training" if n > cores else ""


def problems(options: Options, site: Site, scheduler: Scheduler) -> list[str]:
    """Return an error for each option that is missing or that the site does not allow."""
    np, nodes, ppn = options.np, node_count(options, site), options.ppn
    uneven = f"-n {np} on {nodes} nodes contradicts --ppn {ppn}; omit one of -n, -N and --ppn"
    name, known = options.queue or "", ", ".join(site.queues)
    misspelled = nearest(name, site.queues) if site.all_queues and name and name not in site.queues else ""
    checks = (
        (options.walltime is None, "--submit needs --walltime H:MM:SS"),
        # Otherwise the launch inside the job would refuse it, perhaps after hours in the queue.
        (np and ppn and np != nodes * ppn, uneven),
        (site.submit.get("account_needed") and not options.account, f"--submit on {site.name} needs --account PROJECT"),
        (site.submit.get("queue_needed") and not options.queue, f"--submit on {site.name} needs --queue NAME"),
        (misspelled, f"--queue {name} is not one of {site.name}'s {known}{misspelled}"),
        (jobs := too_many(options, site), jobs),
    )
    found = [problem for wrong, problem in checks if wrong] + list(sweeps_and_studies.problems(options))
    return found + _of_queue(options, site, nodes_of_job(options, site)) + _part_of_a_node(options, site, scheduler)


def doubt(options: Options, site: Site) -> str:
    """Return a warning if the site's file, which may be outdated, does not list the queue; empty: it does."""
    names = (options.queue or "").split(",")
    name = next((name for name in names if name and name not in site.queues), "")
    if not name or not site.queues:
        return ""
    known = f"{site.name}'s file has {', '.join(site.queues)}{nearest(name, site.queues)}"
    return f"--queue {name}: its limits are unknown, so only the scheduler checks them ({known})"


def too_many(options: Options, site: Site, points: int = 1) -> str:
    """Return an error if the queue takes fewer jobs per user; empty: it takes them, or the limit is unknown.

    Args:
        options: the options of each submission.
        site: the cluster.
        points: number of submissions.
    """
    wanted, limit = points * options.chain, site.queue(options.queue).get("jobs")
    if limit is None or wanted <= limit:
        return ""
    chain = f"--chain {options.chain}" if options.chain > 1 else ""
    asked = " with ".join(filter(None, (f"{points} jobs" if points > 1 else "", chain)))
    nodes, hours = nodes_of_job(options, site), _hours(options)
    able = [name for name, queue in site.queues.items() if queue.get("jobs", wanted) >= wanted]
    others = _others(site, able, nodes, hours)
    takes = f"accepts {limit} job{'s' * (limit > 1)} per user at a time, queued or running"
    return f"{asked}: {_named(options, site)} {takes}{others or '; submit the next when one has ended'}"


def check_points(options: Options, site: Site, points: int, remedy: str) -> None:
    """Check, before the first job is submitted, that the queue takes as many jobs as there are ``points``.

    Raises:
        ConfigError: names the queue, its limit and ``remedy``.
    """
    if problem := too_many(options, site, points):
        raise ConfigError(f"{problem}; {remedy}", page="launch.md#submit")


def _of_queue(options: Options, site: Site, nodes: int) -> list[str]:
    """Return errors for more or fewer nodes, or a longer time, than the queue allows."""
    queue, hours, named = site.queue(options.queue), _hours(options), _named(options, site)
    least, most = queue.get("nodes", (1, nodes))
    count = f"{nodes} node{'s' * (nodes > 1)}"
    asked = f"{count} (for -n {options.np})" if options.np else f"{count}, without -N"
    if options.nodes:
        asked = f"-N {options.nodes}"
    if options.spare_nodes:
        asked += f" and --spare-nodes {options.spare_nodes}"
    jobs = f"jobs of {count}" if isinstance(queue.get("hours"), Mapping) else "jobs"
    ends = _longest(queue, nodes)
    found = []
    if not least <= nodes <= most:
        found.append(f"{asked}: {named} takes {' to '.join(map(str, dict.fromkeys((least, most))))} nodes")
    if hours > ends:
        found.append(f"--walltime {options.walltime}: {named} ends {jobs} after {ends:g} h")
    if found:
        found[-1] += _others(site, site.queues, nodes, hours)
    return found


def _others(site: Site, names: Iterable[str], nodes: int, hours: float) -> str:
    """Return which of the queues ``names`` take a job, in words to append to an error; empty: none is known to."""
    able = [name for name in names if _fits(site.queues[name], nodes, hours)]
    limits = ((name, _in_words(site.queues[name])) for name in able[:MOST_NAMED])
    described = ", ".join(f"{name} ({words})" if words else name for name, words in limits)
    return f"; a queue that accepts it: {described}" if able else ""


def _named(options: Options, site: Site) -> str:
    if options.queue:
        return f"{site.name}'s queue {options.queue}"
    return f"{site.name}'s default queue {site.default_queue}"


def _hours(options: Options) -> float:
    return seconds(options.walltime) / 3600 if options.walltime else 0.0


def _longest(queue: Mapping[str, Any], nodes: int) -> float:
    """Return how many hours a queue gives to a job."""
    hours = queue.get("hours", math.inf)
    if isinstance(hours, Mapping):
        hours = next((limit for size, limit in sorted(hours.items()) if nodes <= size), math.inf)
    return float(hours)


def _fits(queue: Mapping[str, Any], nodes: int, hours: float) -> bool:
    """Return whether a queue with known limits takes a job."""
    least, most = queue.get("nodes", (1, nodes))
    return bool(queue) and least <= nodes <= most and hours <= _longest(queue, nodes)


def _in_words(queue: Mapping[str, Any]) -> str:
    least, most = queue.get("nodes", (0, 0))
    nodes = f"{least} to {most} nodes" if most > 1 else "1 node" if most else ""
    hours = queue.get("hours")
    longest = max(hours.values()) if isinstance(hours, Mapping) else hours
    jobs = f"{queue['jobs']} job{'s' * (queue['jobs'] > 1)} of a user" if "jobs" in queue else ""
    return ", ".join(filter(None, (nodes, f"up to {longest} h" if longest else "", jobs)))


def _part_of_a_node(options: Options, site: Site, scheduler: Scheduler) -> list[str]:
    """Return errors for --gpus and --cores that the site does not allow."""
    found = []
    for name, asked, has, what, resource in (
        ("--gpus", options.gpus, site.devices, "GPUs", "gpu"),
        ("--cores", options.cores, site.cores, "cores", "cpus"),
    ):
        if asked is None or asked == has:
            continue
        fixed = scheduler.fixed(site, site.queue(options.queue), resource)
        if has is not None and asked > has:
            found.append(f"{name} {asked}: a node of {site.name} has {has or 'no'} {what}")
        elif fixed:
            remedy = f"leave {name} out, or change it in your own site file (--site FILE)"
            found.append(f"{name} {asked}: the file of {site.name} says {fixed}; {remedy}")
    return found
