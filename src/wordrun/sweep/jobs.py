"""Submits the points of a sweep as jobs: one point per job, or several."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from dataclasses import replace

from wordrun.errors import ConfigError
from wordrun.launch import limits, site_files, submit as launch_submit
from wordrun.launch.freeze import describe
from wordrun.launch.parser import parse
from wordrun.launch.request import Options
from wordrun.launch.schedulers.base import node_count, total_ranks
from wordrun.launch.site import Site
from wordrun.sweep.folder import Point, Sweep
from wordrun.sweep.options import LauncherOptions
from wordrun.sweep.pool import quoted


def submit(sweep: Sweep, points: Sequence[Point]) -> int:
    """Submit jobs that run ``points``, which all use the same copy of the code; return the exit status.

    Raises:
        ConfigError: an option is missing or not allowed.
        SubmitError: the scheduler refuses a job; those before it stay submitted.
    """
    left = _left(sweep, points)
    points = [point for point in points if point not in left]
    if left:
        print(f"sweep {sweep.dir}: points not resubmitted, because their jobs are pending or running: {len(left)}")
    if not points:
        print(f"sweep {sweep.dir}: all {'other ' if left else ''}points have finished or are running")
        return 0
    size = sweep.options.points_per_job
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    first = job(sweep, chunks[0])  # reports what is wrong with the options before anything is written
    known, _ = site_files.find(first.site, socket.gethostname(), os.environ)
    left_jobs = len({sweep.jobs[str(point.number)] for point in left})
    remedy = "hydra.launcher.points_per_job=N puts N points into a job"
    limits.check_points(first, known, left_jobs + len(chunks), remedy)
    launch_submit.send(replace(first, dry_run=True))
    sweep.save()
    frozen = None if first.no_freeze else launch_submit.freeze_for(launch_submit.job_path("sweep"))
    for number, chunk in enumerate(chunks):
        options = replace(job(sweep, chunk), job_name=f"sweep-{number}", no_freeze=frozen is None)
        run_id = f"{sweep.id}-{chunk[0].number}"
        done = launch_submit.send(options, run_id, frozen)
        sweep.jobs.update(dict.fromkeys((str(point.number) for point in chunk), done.jobs[-1]))
        sweep.save()
        names = ", ".join(str(point.number) for point in chunk)
        print(f"point{'s' * (len(chunk) > 1)} {names}: job {done.jobs[0]} ({done.path})", flush=True)
    print(describe(frozen))
    print(f"wordrun ls {sweep.dir} shows the runs; the same command with hydra.launcher.resume=true ", end="")
    print(f"hydra.sweep.dir={sweep.dir} submits the unfinished points")
    return 0


def _left(sweep: Sweep, points: Sequence[Point]) -> list[Point]:
    """Return the points whose jobs the scheduler still knows."""
    asked = {sweep.jobs[str(point.number)] for point in points if str(point.number) in sweep.jobs}
    if not asked:
        return []
    options = job(sweep, points[:1])
    site, _ = site_files.find(options.site, socket.gethostname(), os.environ)
    scheduler = launch_submit.scheduler_of(options, site)
    known = {each for each in asked if scheduler.has_job(each)}
    return [point for point in points if sweep.jobs.get(str(point.number)) in known]


def job(sweep: Sweep, chunk: Sequence[Point]) -> Options:
    """Return the options of launch that submit one job for the points ``chunk``.

    Raises:
        ConfigError: an option is not valid.
    """
    options = sweep.options
    given = (("--walltime", options.walltime), ("--queue", options.queue), ("--account", options.account))
    words = ["--submit", *(word for flag, value in given if value for word in (flag, value))]
    try:
        words += shlex.split(options.args)
    except ValueError as error:
        raise ConfigError(f'hydra.launcher.args="{options.args}": {error}') from None
    if options.points_per_job == 1:
        (point,) = chunk
        run_dir = f"hydra.run.dir={quoted(os.path.abspath(point.dir))}"
        return parse([*options.ranks(), *words, "--", *sweep.command, *point.overrides, run_dir])
    numbers = [str(point.number) for point in chunk]
    command = [*sweep.command[:3], "sweep", os.path.abspath(sweep.dir), *numbers]
    parsed = parse([*options.ranks(), *words, "--", *command])
    site, _ = site_files.find(parsed.site, socket.gethostname(), os.environ)
    return together(options, parsed, site, len(chunk))


def together(options: LauncherOptions, parsed: Options, site: Site, count: int) -> Options:
    """Return ``parsed``, which asks for the ranks of one point, with the nodes and ranks of ``count`` points."""
    nodes = node_count(parsed, site)
    ranks = total_ranks(parsed, site)
    slots = site.ranks_per_node or site.devices or 0
    per_node = max(1, slots // ranks) if nodes == 1 else 1
    wanted = options.job_nodes or (-(-count // per_node) if nodes == 1 else nodes * count)
    if wanted < nodes:
        raise ConfigError(f"hydra.launcher.job_nodes={wanted}: one point needs {nodes} nodes; use {nodes} or more")
    ppn = per_node * -(-ranks // nodes)
    return replace(parsed, np=None, nodes=wanted, ppn=ppn)
