"""Submits points as jobs, and looks up what has become of the jobs."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from wordrun.common.run_dir import new_run_id
from wordrun.launch import limits, site_files, submit as launch_submit
from wordrun.launch.code_snapshot import describe
from wordrun.launch.options import Options
from wordrun.launch.parser import parse
from wordrun.launch.schedulers.base import Scheduler
from wordrun.study.points import SUBMITTED, Point, Points

Job = Callable[[Sequence[Point]], Options]
"""Returns the options of launch that submit some points as one job."""


def named(launch: Sequence[str], point: Point, command: Sequence[str], kind: str = "") -> Options:
    """Return the options of launch that submit ``command`` as a job with the name of ``point``.

    Raises:
        ConfigError: an option is not valid.
    """
    options = parse([*launch, "--submit", "--", *command])
    asked = any(word.partition("=")[0] == "--job-name" for word in launch)
    words = [*([options.job_name] if asked else []), kind, point.name]
    return replace(options, job_name=re.sub(r"[^\w.+-]", "-", "-".join(filter(None, words))))


def check(table: Points, options: Options, count: int, remedy: str) -> None:
    """Check, before the first job is submitted, the options of the jobs, and whether a queue takes so many.

    Args:
        table: the points' table.
        options: those of the first job.
        count: how many jobs are to be submitted.
        remedy: what to do if a queue does not take so many.

    Raises:
        ConfigError: an option is missing or not allowed.
    """
    site, _ = site_files.find(options.site, socket.gethostname(), os.environ)
    waiting = {row["reason"] for row in table.rows.values() if row["state"] == SUBMITTED}
    limits.check_points(options, site, len(waiting) + count, remedy)
    launch_submit.send(replace(options, dry_run=True))


def submit(table: Points, chunks: Sequence[Sequence[Point]], job: Job) -> None:
    """Submit a job for each of ``chunks``, which all run the same copy of the code, and record their points.

    Raises:
        SubmitError: the scheduler rejects a job; those before it stay submitted.
    """
    freezes = not job(chunks[0]).no_freeze
    snapshot = launch_submit.snapshot_for(launch_submit.job_path(table.study)) if freezes else None
    for chunk in chunks:
        for point in chunk:
            point.clear()
        options = replace(job(chunk), no_freeze=snapshot is None)
        done = launch_submit.send(options, chunk[0].run_id or new_run_id(), snapshot)
        table.put(chunk, SUBMITTED, f"job {' '.join(done.jobs)}")
        names = ", ".join(point.name for point in chunk)
        print(f"point{'s' * (len(chunk) > 1)} {names}: job {' then '.join(done.jobs)} ({done.path})", flush=True)
    print(describe(snapshot))


def are_left(options: Options, ids: Sequence[str]) -> bool | None:
    """Return whether one of the jobs ``ids`` waits or runs; None: their scheduler does not answer.

    Args:
        options: those of launch that submitted them.
        ids: the scheduler's ids.
    """
    scheduler = _scheduler(options)
    answers = {scheduler.has_job(each) for each in ids}
    return True if True in answers else None if None in answers else False


def output(options: Options, job_id: str) -> Path:
    """Return the file with the output of the job ``job_id``, which the ``options`` of launch submitted."""
    return Path(_scheduler(options).output.format(name=options.job_name, number=job_id.partition(".")[0]))


def _scheduler(options: Options) -> Scheduler:
    return launch_submit.scheduler_of(options, site_files.find(options.site, socket.gethostname(), os.environ)[0])
