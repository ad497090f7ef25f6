"""The points of a study as jobs: how they are submitted, and what has become of them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from wordrun.errors import UserError
from wordrun.launch import limits, site_files
from wordrun.launch.parser import parse
from wordrun.launch.request import Options
from wordrun.launch.schedulers.base import Scheduler
from wordrun.launch.submit import scheduler_of


def named(launch: Sequence[str], point: str) -> list[str]:
    """Return the options ``launch`` with those that submit a point, whose job has its name unless they name it."""
    asked = any(word.partition("=")[0] == "--job-name" for word in launch)
    return [*launch, "--submit", *([] if asked else ["--job-name", re.sub(r"[^\w.+-]", "-", point)])]


def check(launches: Sequence[Sequence[str]], waiting: int) -> None:
    """Refuse more jobs than a queue takes, before the first is submitted.

    Args:
        launches: the options of launch for each point.
        waiting: how many jobs of earlier calls wait or run.

    Raises:
        ConfigError: names the queue and its limit.
    """
    parsed = [parse([*launch, "--", "wordrun"]) for launch in launches]
    remedy = "or submit the study as one job: launch --submit ... -- wordrun study ... without its own --submit"
    for queue in dict.fromkeys(options.queue for options in parsed):
        options = [each for each in parsed if each.queue == queue]
        site, _ = site_files.find(options[0].site, socket.gethostname(), os.environ)
        limits.check_points(options[0], site, waiting + len(options), remedy)


def submit(point: str, command: Sequence[str], env: Mapping[str, str]) -> str:
    """Submit a point by ``command``, a launch with --submit --json; return the ids of its jobs.

    Raises:
        UserError: the options are wrong, or the scheduler refuses the job.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise UserError(f"cannot submit {point}: {done.stderr.strip()}")
    return " ".join(json.loads(done.stdout)["jobs"])


def are_left(launch: Sequence[str], ids: Sequence[str]) -> bool | None:
    """Return whether one of the jobs ``ids`` waits or runs; None: their scheduler does not answer.

    Args:
        launch: the options of launch that submitted them.
        ids: the scheduler's ids.
    """
    _, scheduler = _submission(launch)
    answers = {scheduler.has_job(each) for each in ids}
    return True if True in answers else None if None in answers else False


def output(launch: Sequence[str], job_id: str) -> Path:
    """Return the file with the output of the job ``job_id``, which the options ``launch`` submitted."""
    options, scheduler = _submission(launch)
    return Path(scheduler.output.format(name=options.job_name, number=job_id.partition(".")[0]))


def _submission(launch: Sequence[str]) -> tuple[Options, Scheduler]:
    """Return the options ``launch`` as parsed, and the scheduler that they submit to."""
    options = parse([*launch, "--", "wordrun"])
    return options, scheduler_of(options, site_files.find(options.site, socket.gethostname(), os.environ)[0])
