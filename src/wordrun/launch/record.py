"""``launch.json``: which run a launch belongs to, what was run, when, where and how it ended, without secrets."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wordrun
from wordrun.errors import ConfigError
from wordrun.files import replace
from wordrun.launch.job import Job
from wordrun.launch.plan import LaunchPlan
from wordrun.run_id import new_run_id

# KEY in API_KEY and apikey2, but not TOKEN in tokenizer and TOKENIZERS_PARALLELISM.
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE)
HIDDEN = "***"


def mask(name: str, value: str) -> str:
    """Return ``value``, or asterisks if ``name`` is that of a secret."""
    return HIDDEN if SECRET.search(name) else value


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the command line ``words`` with the values of secret NAME=VALUE words hidden."""
    masked = []
    for word in words:
        name, equals, value = word.partition("=")
        named = equals and re.fullmatch(r"[-+~\w./@]+", name)
        masked.append(f"{name}={mask(name, value)}" if named else word)
    return masked


def facts(plan: LaunchPlan) -> dict[str, Any]:
    """Return all that is known of a launch before it starts, ready for JSON."""
    return {
        "command": mask_words(plan.options.command),
        "argv": mask_words(plan.argv),
        "np": plan.ranks.np,
        "ppn": plan.ranks.ppn,
        "hosts": list(plan.hosts),
        "site": plan.site.name or None,
        "scheduler": plan.job.scheduler,
        "job": plan.job.id or None,
        "restarts": plan.job.restarts,
        "launcher": plan.launcher.name,
        "launcher_path": plan.launcher.path or None,
        "env_set": {name: mask(name, value) for name, value in plan.env.items()},
        "env_unset": list(plan.env_unset),
        "cwd": plan.decided.cwd,
        "launch_id": plan.decided.launch_id,
        "run_id": plan.env["WORDRUN_RUN_ID"],
        "reasons": dict(plan.reasons),
    }


class Record:
    """The launch's record; written at its start and again at its end."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.path = plan.env["WORDRUN_LAUNCH_RECORD"]
        system = os.uname()
        self.content = {
            **facts(plan),
            "versions": {
                "wordrun": wordrun.__version__,
                "python": sys.version.split()[0],
                "platform": f"{system.sysname} {system.release} {system.machine}",
            },
            "start": _now(),
            "end": None,
            "exit_status": None,
        }

    def begin(self) -> None:
        """Write the file for the first time; raises OSError."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._write()

    def end(self, status: int) -> None:
        """Complete the file with the end of the launch."""
        self.content |= {"end": _now(), "exit_status": status}
        self._write()

    def _write(self) -> None:
        # Rank 0 moves the file into its run directory and leaves a link: the real file is the one to replace.
        replace(Path(os.path.realpath(self.path)), json.dumps(self.content, indent=2) + "\n")


def _now() -> str:
    """Return the local time with its offset, in ISO 8601."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return f"{stamp[:-2]}:{stamp[-2:]}"


@dataclass(frozen=True)
class Identity:
    """The run's name, and whether it may have a state to resume from."""

    run_id: str
    why: str = ""
    """Where the name comes from; empty: it is new."""
    resume: str = ""
    """Why the ranks should resume (WORDRUN_RESUME=auto); empty: no reason to."""


def choose_run(env: Mapping[str, str], job: Job, command: Sequence[str], folder: str) -> Identity:
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
