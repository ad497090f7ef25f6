"""The run that a launch belongs to: a new one, or one that an earlier job or attempt began."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wordrun.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.run_id import new_run_id


@dataclass(frozen=True)
class Identity:
    """The run's name, and whether it may have a state to resume from."""

    run_id: str
    why: str = ""
    """Where the name comes from; empty: it is new."""
    resume: str = ""
    """Why the ranks should resume (WORDRUN_RESUME=auto); empty: no reason to."""


def choose(env: Mapping[str, str], job: Job, command: Sequence[str], folder: str) -> Identity:
    """Return which run this is: the one that WORDRUN_RUN_ID names, the one that a requeued job began, or a new one.

    Args:
        env: this process's environment. That of a rank names the rank's own run, which this one is not.
        job: the scheduler's job.
        command: what the ranks run, without secrets.
        folder: the folder of the records of launches.

    Raises:
        ConfigError: WORDRUN_RUN_ID cannot be part of a file name.
    """
    named = exported_id(env)
    if named:
        return Identity(named, "WORDRUN_RUN_ID was exported")
    if job.restarts:
        begun = _begun_before(job, command, folder)
        count = f"{job.reasons.get('restarts', 'restarts')}={job.restarts}"
        if begun:
            return Identity(begun, f"begun by this job before it was requeued ({count})", f"requeued: {count}")
    return Identity(new_run_id())


def exported_id(env: Mapping[str, str]) -> str:
    """Return the run's name that the user, or a job script, has exported; empty: none.

    Raises:
        ConfigError: it cannot be part of a file name.
    """
    run_id = env.get("WORDRUN_RUN_ID", "")
    if not run_id or "WORDRUN_LAUNCH_ID" in env:
        return ""
    if not re.fullmatch(r"\w[\w.-]*", run_id, re.ASCII):
        raise ConfigError(
            f"WORDRUN_RUN_ID={run_id}: it is part of file names, so only letters, digits and _ . - are allowed"
        )
    return run_id


def file_name(folder: str, run_id: str) -> str:
    """Return the name in ``folder`` of this launch's files: the run's, with a number where it is not the first one."""
    name, number = run_id, 1
    while glob.glob(os.path.join(glob.escape(folder), f"{name}.*")):
        number += 1
        name = f"{run_id}-{number}"
    return name


def _begun_before(job: Job, command: Sequence[str], folder: str) -> str:
    """Return the first run of ``command`` that earlier attempts of ``job`` began and this one has not resumed yet.

    One script may launch the same command several times.
    """
    import json

    tries: dict[str, int] = {}
    for path in glob.glob(os.path.join(glob.escape(folder), "*.json")):
        try:
            with open(path) as file:
                facts = json.load(file)
        except (OSError, ValueError):
            continue  # its run directory is gone, or it is being written
        if facts.get("job") == job.id and facts.get("command") == list(command):
            run_id = facts["run_id"]
            tries[run_id] = max(tries.get(run_id, 0), facts.get("restarts", 0))
    return next((run_id for run_id in sorted(tries) if tries[run_id] < job.restarts), "")
