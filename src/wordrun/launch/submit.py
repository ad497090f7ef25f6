"""``launch --submit``: write a job script for the site's scheduler, and submit it."""

from __future__ import annotations

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

from wordrun.errors import REQUEUE, ConfigError, UserError, nearest
from wordrun.launch import planner, site_files
from wordrun.launch.freeze import Frozen, describe, freeze
from wordrun.launch.parser import INNER
from wordrun.launch.request import Options, seconds
from wordrun.launch.schedulers import SUBMITTERS
from wordrun.launch.schedulers.base import Scheduler, node_count
from wordrun.launch.site import Site
from wordrun.launch.supervisor import say
from wordrun.run_id import new_run_id

# Default --walltime-margin for wordrun: MARGIN_S seconds, but at most 1/MARGIN_PART of the walltime.
MARGIN_S = 120.0
MARGIN_PART = 20
# System prefixes are not environments: put first in PATH, they would hide what a site's modules provide.
SYSTEM = ("/usr", "/usr/local")


class SubmitError(UserError):
    """The scheduler refused the job."""

    exit_status = 2


@dataclass(frozen=True)
class Origin:
    """Where a job script runs, and its Python environment."""

    cwd: str
    prefix: str
    """The Python environment with wordrun."""
    setup: str
    """The repository's bin/setup.sh; empty: there is none."""
    frozen: Frozen | None = None
    """The copy of the code to run; None: the original."""


def script(options: Options, site: Site, scheduler: Scheduler, origin: Origin, run_id: str) -> str:
    """Return the text of the job script.

    Args:
        options: --submit's own options become directives; the others go to the launch inside the job.
        site: the cluster.
        scheduler: its scheduler.
        origin: where it runs.
        run_id: the run to begin or continue, the same for every job with this script.

    Raises:
        ConfigError: names every option that is missing or that the site does not allow.
    """
    problems = _problems(options, site, scheduler)
    if problems:
        raise ConfigError("\n".join(problems))
    options = replace(options, walltime_margin=margin(options))
    lines = [
        # A login shell: many sites define `module` only there.
        "#!/bin/bash --login",
        f"# {' '.join(site.description.split()) if site.name else 'an unknown cluster'}; written by launch --submit",
        *(f"{scheduler.directive} {directive}" for directive in scheduler.directives(options, site)),
        "",
        f"cd {shlex.quote(origin.frozen.cwd if origin.frozen else origin.cwd)} || exit",
    ]
    # Exit statuses of module commands are unreliable; setup_python checks that they took effect.
    activation, home = _environment(origin.prefix, bool(site.modules))
    lines += [*site.modules, *activation]
    if origin.setup:
        setup_job = ["setup_job", *passed_on(options, scheduler)]
        setup_python = f"setup_python {shlex.quote(home)}" if home else "setup_python"
        lines.append(f"source {shlex.quote(origin.setup)} && {setup_python} && {shlex.join(setup_job)} || exit")
    if origin.frozen:
        path = f"{shlex.quote(os.pathsep.join(origin.frozen.path))}${{PYTHONPATH:+:$PYTHONPATH}}"
        lines += [f"export PYTHONPATH={path}"] * bool(origin.frozen.path)
        lines.append(f"export WORDRUN_CODE={shlex.quote(origin.frozen.record)}")
    lines += [f"export WORDRUN_RUN_ID={shlex.quote(run_id)}", "export WORDRUN_RESUME=auto"]
    return "\n".join([*lines, "", *_ending(options, scheduler), ""])


def _environment(prefix: str, modules: bool) -> tuple[list[str], str]:
    """Return the lines that make ``prefix`` the Python environment, and the argument that setup_python needs.

    Args:
        prefix: the environment that launch was called from.
        modules: whether the site's modules are loaded first.
    """
    quoted, path = shlex.quote(prefix), f"PATH={shlex.quote(os.path.join(prefix, 'bin'))}:$PATH"
    if os.path.isdir(os.path.join(prefix, "conda-meta")):
        # A batch shell often has no `conda`, and only `conda` runs the environment's activation scripts.
        return [f"conda activate {quoted} 2>/dev/null || export {path} CONDA_PREFIX={quoted}"], prefix
    if os.path.isfile(os.path.join(prefix, "bin", "activate")):
        return [f"source {shlex.quote(os.path.join(prefix, 'bin', 'activate'))}"], ""
    there = os.path.isfile(os.path.join(prefix, "bin", "python"))
    if modules and (prefix in SYSTEM or not there):
        return [], ""
    return [f"export {path}"], prefix if there else ""


def margin(options: Options) -> float | None:
    """Return --walltime-margin, or its default for wordrun's training; None: other commands may not handle SIGUSR1."""
    if options.walltime_margin is not None or options.walltime is None or not options.trains:
        return options.walltime_margin
    return min(MARGIN_S, seconds(options.walltime) // MARGIN_PART)


def _ending(options: Options, scheduler: Scheduler) -> list[str]:
    """Return the lines that run the launch and, if it has saved, continue its run."""
    echo = 'echo "saved: the next job of the chain resumes the run (after the last one, submit this script again)"'
    continuing = (echo, "status=0") if options.chain > 1 else scheduler.continuing
    return [
        f"# {scheduler.canceller} and the time limit signal this shell too: then the ranks save, and the job is over",
        "trap 'ending=yes' TERM",
        # A sweep launches its points itself.
        shlex.join(options.command if options.sweeps else inner(options, scheduler)),
        "status=$?",
        f'if [ "$status" -eq {REQUEUE} ] && [ -z "${{ending-}}" ]; then',
        *(f"  {line}" for line in continuing),
        "fi",
        'exit "$status"',
    ]


def inner(options: Options, scheduler: Scheduler) -> list[str]:
    """Return the launch command that the script runs: with all options except the submission's."""
    return ["launch", *passed_on(options, scheduler), "--", *options.command]


def passed_on(options: Options, scheduler: Scheduler) -> list[str]:
    """Return the options of the launch inside the job."""
    words: list[str] = []
    for option in INNER:
        value = getattr(options, option.field)
        is_given = bool(value) or (option.field == "stay" and value is not None)  # 0 is not its default
        if not is_given or (option.field == "walltime_margin" and scheduler.sends_warning(options)):
            continue
        if option.field == "env":
            words += [word for name, text in value for word in (option.names[-1], f"{name}={text}")]
        elif value is True:
            words.append(option.names[0])
        else:
            text = f"{value:.15g}" if isinstance(value, float) else f"{value}"
            words += [option.names[0], shlex.join(value) if isinstance(value, tuple) else text]
    return words


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
        parents = (os.path.dirname(folder), folder)
        in_the_way = [name for name in parents if os.path.lexists(name) and not os.path.isdir(name)]
        why = f"{in_the_way[0]} is not a folder; move it away" if in_the_way else error.strerror
        raise ConfigError(
            f"cannot write the job script {path}: {why}; or call launch from a folder other than {os.getcwd()}"
        ) from None


def commands(scheduler: Scheduler, path: str, jobs: Sequence[str]) -> list[list[str]]:
    """Return the commands that submit ``jobs``, each dependent on the one before it."""
    return [scheduler.submit_command(path, previous) for previous in (None, *jobs[:-1])]


def submit(scheduler: Scheduler, path: str, chain: int, env: Mapping[str, str]) -> list[str]:
    """Submit the script ``chain`` times, each job dependent on the one before it; return the jobs' ids.

    Raises:
        SubmitError: the scheduler refuses the job; the message includes its output.
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
            refused = f"{shlex.join(words)} refused the job (exit status {done.returncode}{so_far})"
            raise SubmitError(f"{refused}:\n{(done.stderr or done.stdout).strip()}")
        jobs.append(scheduler.job_id(done.stdout))
    return jobs


def _problems(options: Options, site: Site, scheduler: Scheduler) -> list[str]:
    np, nodes, ppn, queue = options.np, node_count(options, site), options.ppn, site.queue(options.queue)
    least, most = queue.get("nodes", (1, nodes))
    asked = f"-N {nodes}" if options.nodes else f"{nodes} nodes (for -n {np})"
    hours, jobs = queue.get("hours", float("inf")), "jobs"
    if isinstance(hours, Mapping):
        hours = next((limit for size, limit in sorted(hours.items()) if nodes <= size), float("inf"))
        jobs = f"jobs of {nodes} node{'s' * (nodes > 1)}"
    too_long = options.walltime and seconds(options.walltime) > 3600 * hours
    # The list of queues may be outdated: reject only likely misspellings, and let the scheduler decide.
    hint = nearest(options.queue, site.queues) if options.queue and options.queue not in site.queues else ""
    named = f"{site.name}'s queue {options.queue}"
    uneven = f"-n {np} on {nodes} nodes contradicts --ppn {ppn}; omit one of -n, -N and --ppn"
    checks = (
        (options.walltime is None, "--submit needs --walltime H:MM:SS"),
        # Otherwise the launch inside the job would refuse it, perhaps after hours in the queue.
        (np and ppn and np != nodes * ppn, uneven),
        (site.submit.get("account_needed") and not options.account, f"--submit on {site.name} needs --account PROJECT"),
        (site.submit.get("queue_needed") and not options.queue, f"--submit on {site.name} needs --queue NAME"),
        (hint, f"--queue {options.queue} is not one of {site.name}'s {', '.join(site.queues)}{hint}"),
        (not least <= nodes <= most, f"{asked}: {named} takes {least} to {most} nodes"),
        (too_long, f"--walltime {options.walltime}: {named} ends {jobs} after {hours} h"),
    )
    return [problem for wrong, problem in checks if wrong] + _part_of_a_node(options, site, scheduler)


def _part_of_a_node(options: Options, site: Site, scheduler: Scheduler) -> list[str]:
    """Return errors for --gpus and --cores that the site does not allow."""
    problems = []
    for name, asked, has, what, resource in (
        ("--gpus", options.gpus, site.devices, "GPUs", "gpu"),
        ("--cores", options.cores, site.cores, "cores", "cpus"),
    ):
        if asked is None or asked == has:
            continue
        fixed = scheduler.fixed(site, site.queue(options.queue), resource)
        if has is not None and asked > has:
            problems.append(f"{name} {asked}: a node of {site.name} has {has or 'no'} {what}")
        elif fixed:
            remedy = f"leave {name} out, or change it in a file of your own (--site FILE)"
            problems.append(f"{name} {asked}: the file of {site.name} says {fixed}; {remedy}")
    return problems


@dataclass(frozen=True)
class Submission:
    """A submitted job, or the jobs of a chain."""

    site: Site
    why: str
    """How the site was recognized."""
    scheduler: Scheduler
    run_id: str
    path: str
    """Of the script."""
    text: str
    jobs: list[str]
    frozen: Frozen | None


def main(options: Options) -> int:
    """Write a job script and submit it, or print it; return the exit status."""
    done = send(options)
    site, scheduler, jobs = done.site, done.scheduler, done.jobs
    if options.json:
        to_come = [f"JOB{i + 1}" for i in range(options.chain)]
        facts = {
            "site": site.name or None, "site_why": done.why, "scheduler": scheduler.name, "run_id": done.run_id,
            "path": done.path, "script": done.text, "commands": commands(scheduler, done.path, jobs or to_come),
            "jobs": jobs, "code": done.frozen.facts if done.frozen else None,
        }  # fmt: skip
        print(json.dumps(facts, indent=2))
    elif options.dry_run:
        print(done.text.rstrip("\n"))
    else:
        print(f"submitted {' then '.join(jobs)} (site {site.name or 'unknown'}: {done.why}; script {done.path})")
        print(describe(done.frozen))
        print(
            f"run {done.run_id}; {scheduler.canceller} {' '.join(jobs)} cancels {'all of them' if jobs[1:] else 'it'}"
        )
    return 0


def send(options: Options, run_id: str = "", frozen: Frozen | None = None) -> Submission:
    """Write a job script and submit it, unless ``options.dry_run``.

    Args:
        options: the command line.
        run_id: the run to begin or continue; empty: the exported one, or a new one.
        frozen: the copy of the code to run; None: a new one, unless ``options.no_freeze``.

    Raises:
        ConfigError: options are missing or not allowed, or a file cannot be written.
        SubmitError: the scheduler refuses the job.
    """
    site, why = site_files.find(options.site, socket.gethostname(), os.environ)
    scheduler = scheduler_of(options, site)
    # In the job, a file of the user's own may be neither found by its name nor recognize the host.
    own = site_files.own_file(options.site or site.name, os.environ)
    options = replace(options, site=own or options.site)
    setup = os.path.join(checkout(), "bin", "setup.sh") if checkout() else ""
    origin = Origin(os.getcwd(), sys.prefix, setup if os.path.isfile(setup) else "", frozen)
    run_id = run_id or planner.exported_id(os.environ) or new_run_id()
    text = script(options, site, scheduler, origin, run_id)
    name = job_path(options.job_name)
    if not options.dry_run:
        write(f"{name}.sh", text)
        if not (options.no_freeze or frozen):
            frozen = freeze_for(name)
            text = script(options, site, scheduler, replace(origin, frozen=frozen), run_id)
            write(f"{name}.sh", text)
    jobs = [] if options.dry_run else submit(scheduler, f"{name}.sh", options.chain, os.environ)
    return Submission(site, why, scheduler, run_id, f"{name}.sh", text, jobs, frozen)


def job_path(name: str) -> str:
    """Return the path of a new job's files, without a suffix."""
    return os.path.join("outputs", "jobs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def checkout() -> str:
    """Return the repository that this wordrun is part of; empty: it is installed."""
    root = os.path.abspath(__file__).removesuffix(os.path.join("src", "wordrun", "launch", "submit.py"))
    return root.rstrip(os.sep) if os.path.isdir(root) else ""


def freeze_for(name: str) -> Frozen | None:
    """Return a copy of the code in the folder ``name``; None if the working directory is not a project."""
    frozen = freeze(os.path.abspath(name), os.getcwd(), checkout(), os.environ)
    if frozen is None:
        why = "is not a git repository and has too many files to copy"
        say(f"{os.getcwd()} {why}: the job will run the code as it is when the job starts")
    return frozen


def scheduler_of(options: Options, site: Site) -> Scheduler:
    """Return --scheduler's, else the site's, else one whose command is in PATH; a ConfigError if there is none."""
    in_path = (name for name, each in SUBMITTERS.items() if shutil.which(each.submitter))
    name = options.scheduler or site.scheduler or next(in_path, "")
    if name not in SUBMITTERS:
        submitters = " or ".join(each.submitter for each in SUBMITTERS.values())
        raise ConfigError(f"--submit: no {submitters} in PATH, and neither --site nor --scheduler chooses one")
    return SUBMITTERS[name]
