"""Decides which run a launch begins or continues, and where the records of launches are."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping, Sequence

from wordrun.common.errors import ConfigError
from wordrun.common.run_dir import new_run_id
from wordrun.launch.job import Job
from wordrun.launch.request import Identity
from wordrun.launch.wordrun_command import PYTHON, arguments_of_wordrun


def records_folder(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the folder for the records of launches: of wordrun's runs here, of others in the user's home."""
    own = os.path.join(os.getcwd(), "outputs", "launches")
    if os.path.isdir(own) or _trains(command):
        return own
    state = env.get("XDG_STATE_HOME", "")
    base = state if os.path.isabs(state) else os.path.expanduser("~/.local/state")
    return os.path.join(base, "wordrun", "launches")


def _trains(command: Sequence[str]) -> bool:
    """Return whether ``command`` starts wordrun, also through a shell or a program such as numactl or nsys."""
    names = [os.path.basename(word) for word in command]
    if names and re.fullmatch(r"(ba|da|k|z)?sh", names[0]) and "-c" in names:
        return bool(re.search(r"(^|[\s/])wordrun(\s|$)", " ".join(command)))
    first = next((at for at, name in enumerate(names) if re.fullmatch(PYTHON, name)), 0)
    arguments = arguments_of_wordrun(command[first:])
    return arguments is not None and arguments[:1] != ("test_dist",)  # which has no run


def choose_run(env: Mapping[str, str], job: Job, command: Sequence[str], folder: str) -> Identity:
    """Return the run: the one in WORDRUN_RUN_ID, one that this job began before it was requeued, or a new one.

    Args:
        env: this process's environment. In a rank, WORDRUN_RUN_ID is the rank's own run and is ignored.
        job: the scheduler's job.
        command: what the ranks run, without secrets.
        folder: the folder with the records of launches.

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
    """Return the run ID that the user or a job script has exported; empty: none.

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
    """Return the base name of this launch's files in ``folder``: the run's ID, numbered from its second launch on."""
    name, number = run_id, 1
    while glob.glob(os.path.join(glob.escape(folder), f"{name}.*")):
        number += 1
        name = f"{run_id}-{number}"
    return name


def _begun_before(job: Job, command: Sequence[str], folder: str) -> str:
    """Return the first run of ``command`` that earlier attempts of ``job`` began and this one has not resumed yet.

    One script may launch the same command several times.
    """
    tries: dict[str, int] = {}
    for path in glob.glob(os.path.join(glob.escape(folder), "*.json")):
        try:
            with open(path) as file:
                facts = json.load(file)
        except (OSError, ValueError):
            continue  # the run directory is gone, or the file is being written
        if facts.get("job") == job.id and facts.get("command") == list(command):
            run_id = facts["run_id"]
            tries[run_id] = max(tries.get(run_id, 0), facts.get("restarts", 0))
    return next((run_id for run_id in sorted(tries) if tries[run_id] < job.restarts), "")
