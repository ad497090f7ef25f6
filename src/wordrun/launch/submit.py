"""``launch --submit``: write a job script for the site's scheduler, and submit it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePath

from wordrun.common.errors import ConfigError, UserError
from wordrun.common.files import why
from wordrun.common.run_dir import new_run_id
from wordrun.launch import limits, site_files, sweeps_and_studies
from wordrun.launch.code_snapshot import CodeSnapshot, describe, take_snapshot
from wordrun.launch.job_script import Origin, script
from wordrun.launch.messages import say
from wordrun.launch.options import Options
from wordrun.launch.run_identity import exported_id
from wordrun.launch.schedulers import SUBMITTERS
from wordrun.launch.schedulers.base import Scheduler
from wordrun.launch.site import Site

OUTPUTS = ("hydra.run.dir", "hydra.sweep.dir", "--out")
"""Options of wordrun that name the folder of a run, a sweep or a study."""


class SubmitError(UserError):
    """The scheduler rejected the job."""

    exit_status = 2
    page = "launch.md#submit"


def write(path: str, text: str) -> None:
    """Write the job script ``text`` to ``path``, creating its folders.

    Raises:
        ConfigError: the file cannot be written.
    """
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)  # a part of a script could be submitted by mistake
        parents = (os.path.dirname(folder), folder)
        in_the_way = [name for name in parents if os.path.lexists(name) and not os.path.isdir(name)]
        cause = f"{in_the_way[0]} is not a folder; move it away" if in_the_way else why(error)
        raise ConfigError(
            f"cannot write the job script {path}: {cause}; or call launch from a folder other than {os.getcwd()}",
            page="launch.md#submit",
        ) from None


def commands(scheduler: Scheduler, path: str, jobs: Sequence[str]) -> list[list[str]]:
    """Return the commands that submit ``jobs``, each dependent on the one before it."""
    return [scheduler.submit_command(path, previous) for previous in (None, *jobs[:-1])]


def submit(scheduler: Scheduler, path: str, chain: int, env: Mapping[str, str]) -> list[str]:
    """Submit the script ``chain`` times, each job dependent on the one before it; return the jobs' ids.

    Raises:
        SubmitError: the scheduler rejects the job; the message includes its output.
    """
    jobs: list[str] = []
    for _ in range(chain):
        words = scheduler.submit_command(path, jobs[-1] if jobs else None)
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=dict(env))
        except OSError as error:
            raise SubmitError(f"cannot run {words[0]}: {error.strerror}; the script is {path}") from None
        if done.returncode:
            so_far = f"; submitted before it: {' '.join(jobs)}" if jobs else ""
            refused = f"{shlex.join(words)} rejected the job (exit status {done.returncode}{so_far})"
            raise SubmitError(f"{refused}:\n{(done.stderr or done.stdout).strip()}")
        jobs.append(scheduler.job_id(done.stdout))
    return jobs


@dataclass(frozen=True)
class Submission:
    """A submitted job, or the jobs of a chain."""

    site: Site
    why: str
    """How the site was found."""
    scheduler: Scheduler
    run_id: str
    path: str
    """Path of the script."""
    text: str
    jobs: list[str]
    snapshot: CodeSnapshot | None


def main(options: Options) -> int:
    """Write a job script and submit it, or print it; return the exit status."""
    done = send(options)
    say(sweeps_and_studies.note(options))
    site, scheduler, jobs = done.site, done.scheduler, done.jobs
    if options.json:
        to_come = [f"JOB{i + 1}" for i in range(options.chain)]
        facts = {
            "site": site.name or None,
            "site_why": done.why,
            "scheduler": scheduler.name,
            "run_id": done.run_id,
            "path": done.path,
            "script": done.text,
            "commands": commands(scheduler, done.path, jobs or to_come),
            "jobs": jobs,
            "code": done.snapshot.facts if done.snapshot else None,
        }
        print(json.dumps(facts, indent=2))
    elif options.dry_run:
        print(done.text.rstrip("\n"))
    else:
        print(f"submitted {' then '.join(jobs)} (site {site.name or 'unknown'}: {done.why}; script {done.path})")
        print(describe(done.snapshot))
        print(
            f"run {done.run_id}; {scheduler.canceller} {' '.join(jobs)} cancels {'all of them' if jobs[1:] else 'it'}"
        )
    return 0


def send(options: Options, run_id: str = "", snapshot: CodeSnapshot | None = None) -> Submission:
    """Write a job script and submit it, unless ``options.dry_run``.

    Args:
        options: the command line.
        run_id: the run to begin or continue; empty: the exported one, or a new one.
        snapshot: the copy of the code to run; None: a new one, unless ``options.no_freeze``.

    Raises:
        ConfigError: options are missing or not allowed, or a file cannot be written.
        SubmitError: the scheduler rejects the job.
    """
    site, why = site_files.find(options.site, socket.gethostname(), os.environ)
    scheduler = scheduler_of(options, site)
    # In the job, a user's site file might not be found by its name, and might not recognize the host.
    own = site_files.own_file(options.site or site.name, os.environ)
    options = replace(options, site=own or options.site)
    setup = os.path.join(checkout(), "bin", "setup.sh") if checkout() else ""
    name = job_path(options.job_name)
    origin = Origin(
        os.getcwd(),
        sys.prefix,
        setup if os.path.isfile(setup) else "",
        os.path.abspath(f"{name}.finished"),
        snapshot,
        os.environ,
    )
    warning = "" if run_id else limits.doubt(options, site)  # a sweep has warned once for all its points
    run_id = run_id or exported_id(os.environ) or new_run_id()
    text = script(options, site, scheduler, origin, run_id)
    say(warning)
    if not options.dry_run:
        write(f"{name}.sh", text)
        if not (options.no_freeze or snapshot):
            make_outputs(options.command)
            snapshot = snapshot_for(name)
            text = script(options, site, scheduler, replace(origin, snapshot=snapshot), run_id)
            write(f"{name}.sh", text)
    jobs = [] if options.dry_run else submit(scheduler, f"{name}.sh", options.chain, os.environ)
    return Submission(site, why, scheduler, run_id, f"{name}.sh", text, jobs, snapshot)


def job_path(name: str) -> str:
    """Return the path of a new job's files, without a suffix."""
    return os.path.join("outputs", "jobs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def checkout() -> str:
    """Return the repository that this wordrun is part of; empty: it is installed."""
    root = os.path.abspath(__file__).removesuffix(os.path.join("src", "wordrun", "launch", "submit.py"))
    return root.rstrip(os.sep) if os.path.isdir(root) else ""


def make_outputs(command: Sequence[str]) -> None:
    """Create the folders below this one that wordrun's ``command`` will write to: the copy of the code links to them.

    Otherwise the job would create them in the copy.
    """
    for option, value in pairwise([*(part for word in command for part in word.split("=", 1)), ""]):
        path = PurePath(value)
        if option in OUTPUTS and path.parts and not path.is_absolute() and ".." not in path.parts and "${" not in value:
            with contextlib.suppress(OSError):
                os.makedirs(path.parts[0], exist_ok=True)


def snapshot_for(name: str) -> CodeSnapshot | None:
    """Return a copy of the code in the folder ``name``; None if the working directory is not a project."""
    snapshot = take_snapshot(os.path.abspath(name), os.getcwd(), checkout(), os.environ)
    if snapshot is None:
        why = "is not a git repository and has too many files to copy"
        say(f"{os.getcwd()} {why}: the job will run the code as it is when the job starts")
    return snapshot


def scheduler_of(options: Options, site: Site) -> Scheduler:
    """Return --scheduler's, else the site's, else one whose command is in PATH; a ConfigError if there is none."""
    in_path = (name for name, each in SUBMITTERS.items() if shutil.which(each.submitter))
    name = options.scheduler or site.scheduler or next(in_path, "")
    if name not in SUBMITTERS:
        submitters = " or ".join(each.submitter for each in SUBMITTERS.values())
        raise ConfigError(f"--submit: no {submitters} in PATH, and neither --site nor --scheduler chooses one")
    return SUBMITTERS[name]
