"""``launch --submit``: write a job script for the site's scheduler and hand it over."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from wordrun.errors import REQUEUE, ConfigError, UserError, nearest
from wordrun.launch.options import INNER, Options
from wordrun.launch.site import Site, fill

SUBMITTERS = {"pbs": "qsub", "slurm": "sbatch"}
CANCELLERS = {"pbs": "qdel", "slurm": "scancel"}
# How long before the walltime ends wordrun is told to save, unless --walltime-margin says; of a short one, a part.
MARGIN_S = 120.0
MARGIN_PART = 20


class SubmitError(UserError):
    """The scheduler did not take the job."""

    exit_status = 2


@dataclass(frozen=True)
class Place:
    """Where a job script runs, as far as this machine knows."""

    cwd: str
    prefix: str
    """The Python environment that has wordrun."""
    setup: str
    """The repository's bin/setup.sh; empty: there is none."""


def script(options: Options, site: Site | None, scheduler: str, place: Place, run_id: str) -> str:
    """Return the text of the job script.

    Args:
        options: what is asked for; --submit's own options become directives, the others go to the launch inside.
        site: the cluster, where it is known.
        scheduler: pbs or slurm.
        place: where it runs.
        run_id: the run that it begins or continues; every job with this script works on the same one.

    Raises:
        ConfigError: names every option that is missing or that the site does not allow.
    """
    problems = _problems(options, site)
    if problems:
        raise ConfigError("\n".join(problems))
    options = replace(options, walltime_margin=margin(options))
    directives = (_pbs if scheduler == "pbs" else _slurm)(options, site)
    mark = "#PBS" if scheduler == "pbs" else "#SBATCH"
    lines = [
        # A login shell: without it many sites have no `module`.
        "#!/bin/bash --login",
        f"# {site.description if site else 'an unknown cluster'}; written by launch --submit",
        *(f"{mark} {directive}" for directive in directives),
        "",
        f"cd {shlex.quote(place.cwd)} || exit",
    ]
    modules = site.modules if site else ()
    # What a module's script returns is nobody's business; setup_python checks that it took effect.
    lines += [*modules]
    if os.path.isfile(os.path.join(place.prefix, "bin", "activate")):
        lines.append(f"source {shlex.quote(os.path.join(place.prefix, 'bin', 'activate'))}")
    elif not modules:
        lines.append(f"export PATH={shlex.quote(os.path.join(place.prefix, 'bin'))}:$PATH")
    if place.setup:
        lines.append(f"source {shlex.quote(place.setup)} && setup_python && setup_job || exit")
    lines += [f"export WORDRUN_RUN_ID={shlex.quote(run_id)}", "export WORDRUN_RESUME=auto"]
    return "\n".join([*lines, "", *_ending(options, scheduler), ""])


def margin(options: Options) -> float | None:
    """Return --walltime-margin, or what it is for wordrun where nothing is said; None for commands that may know none.

    SIGUSR1 ends a program that does not expect it.
    """
    knows = any(os.path.basename(word) == "wordrun" for word in options.command)
    if options.walltime_margin is not None or options.walltime is None or not knows:
        return options.walltime_margin
    return min(MARGIN_S, seconds(options.walltime) // MARGIN_PART)


def _ending(options: Options, scheduler: str) -> list[str]:
    """Return the lines that run the launch, and see to it that a run which has saved goes on."""
    if options.chain > 1:
        go_on = ['echo "saved: the next job of the chain goes on (after the last one, submit this script again)"']
        go_on += ["status=0"]
    elif scheduler == "slurm":
        again = "saved: SLURM starts this job again"
        go_on = [f'echo "{again}"']
        go_on += ['scontrol requeue "$SLURM_JOB_ID" || echo "it does not: submit this script again to go on"']
    else:
        go_on = ['echo "saved: submit this script again to go on"']
    return [
        f"# {CANCELLERS[scheduler]} and the time limit tell this shell too: then the ranks save, and the job is over",
        "trap 'ending=yes' TERM",
        shlex.join(inner(options, scheduler)),
        "status=$?",
        f'if [ "$status" -eq {REQUEUE} ] && [ -z "${{ending-}}" ]; then',
        *(f"  {line}" for line in go_on),
        "fi",
        'exit "$status"',
    ]


def inner(options: Options, scheduler: str) -> list[str]:
    """Return the launch command that the script runs: all options that are not the submission's."""
    words = ["launch"]
    for option in INNER:
        value = getattr(options, option.field)
        if not value or (option.field == "walltime_margin" and _by_slurm(options, scheduler)):
            continue
        if option.field == "env":
            words += [word for name, text in value for word in (option.names[-1], f"{name}={text}")]
        else:
            text = f"{value:.15g}" if isinstance(value, float) else f"{value}"
            words += [option.names[0], shlex.join(value) if isinstance(value, tuple) else text]
    return [*words, "--", *options.command]


def _by_slurm(options: Options, scheduler: str) -> bool:
    """Say whether SLURM itself sends SIGUSR1, which reaches the ranks of an srun and would end another launcher."""
    return scheduler == "slurm" and options.launcher in (None, "srun")


def seconds(walltime: str) -> int:
    """Return the seconds of ``[D-]H:MM:SS``.

    Raises:
        ValueError: it is something else.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", walltime)
    if not match:
        raise ValueError("should be H:MM:SS, such as 1:00:00")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + rest


def commands(scheduler: str, path: str, previous: str | None) -> list[str]:
    """Return the command that submits the script ``path``, to begin when the job ``previous`` has ended."""
    if scheduler == "pbs":
        return ["qsub", *(["-W", f"depend=afterany:{previous}"] if previous else []), path]
    return ["sbatch", "--parsable", *([f"--dependency=afterany:{previous}"] if previous else []), path]


def submit(scheduler: str, path: str, chain: int, env: Mapping[str, str]) -> list[str]:
    """Submit the script ``chain`` times, each job after the one before it; return the jobs' ids.

    Raises:
        SubmitError: the scheduler refuses, with its own words.
    """
    import subprocess

    jobs: list[str] = []
    for _ in range(chain):
        words = commands(scheduler, path, jobs[-1] if jobs else None)
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=dict(env))
        except OSError as error:
            raise SubmitError(f"cannot run {words[0]}: {error.strerror}; the script is {path}") from None
        if done.returncode:
            so_far = f"; submitted before it: {' '.join(jobs)}" if jobs else ""
            raise SubmitError(
                f"{shlex.join(words)} refused the job (exit status {done.returncode}{so_far}):\n"
                + (done.stderr or done.stdout).strip()
            )
        # sbatch --parsable adds the cluster's name after a semicolon.
        jobs.append(done.stdout.strip().partition(";")[0])
    return jobs


def _nodes(options: Options) -> int:
    if options.nodes:
        return options.nodes
    return -(-options.np // options.ppn) if options.np and options.ppn else 1


def _per_node(options: Options) -> int:
    """Return the ranks of a node, as far as they are asked for."""
    return options.ppn or -(-(options.np or 1) // _nodes(options))


def _problems(options: Options, site: Site | None) -> list[str]:
    problems = []
    if options.walltime is None:
        problems.append("--submit needs --walltime H:MM:SS")
    if site is None:
        return problems
    nodes, wishes = _nodes(options), site.submit
    if wishes.get("account_needed") and not options.account:
        problems.append(f"--submit on {site.name} needs --account PROJECT")
    if wishes.get("queue_needed") and not options.queue:
        problems.append(f"--submit on {site.name} needs --queue NAME")
    if options.queue and site.queues and options.queue not in site.queues:
        # The list may be older than the site's: say so, and let the scheduler decide.
        hint = nearest(options.queue, site.queues)
        if hint:
            problems.append(f"--queue {options.queue} is none of {site.name}'s {', '.join(site.queues)}{hint}")
    queue = site.queues.get(options.queue or "", {})
    least, most = queue.get("nodes", (1, nodes))
    if not least <= nodes <= most:
        problems.append(f"-N {nodes}: {site.name}'s queue {options.queue} takes {least} to {most} nodes")
    if options.walltime and seconds(options.walltime) > 3600 * queue.get("hours", float("inf")):
        problems.append(
            f"--walltime {options.walltime}: {site.name}'s queue {options.queue} ends jobs after {queue['hours']} h"
        )
    return problems


def _pbs(options: Options, site: Site | None) -> Sequence[str]:
    wishes = site.submit if site else {}
    queue = site.queues.get(options.queue or "", {}) if site else {}
    filesystems = options.filesystems or wishes.get("filesystems")
    chunks = _nodes(options) * (_per_node(options) if queue.get("device_per_rank") else 1)
    return [
        f"-N {options.job_name}",
        *([f"-A {options.account}"] if options.account else []),
        *([f"-q {options.queue}"] if options.queue else []),
        f"-l select={chunks}" + (f":{wishes['select']}" if "select" in wishes else ""),
        f"-l walltime={options.walltime}",
        *([f"-l filesystems={filesystems}"] if filesystems else []),
        *wishes.get("directives", []),
        "-j oe",
        f"-r {'y' if queue.get('rerunnable') else 'n'}",
    ]


def _slurm(options: Options, site: Site | None) -> Sequence[str]:
    wishes = site.submit if site else {}
    queue = site.queues.get(options.queue or "", {}) if site else {}
    devices = (site.devices if site else None) or (_per_node(options) if queue.get("device_per_rank") else 0)
    ppn = options.ppn or devices
    given = [fill(word, devices=devices) for word in wishes.get("directives", []) if devices or "{devices}" not in word]
    lines = [
        f"--job-name={options.job_name}",
        *([f"--account={options.account}"] if options.account else []),
        *([f"{wishes.get('queue_option', '--partition')}={options.queue}"] if options.queue else []),
        f"--nodes={_nodes(options)}",
        f"--time={options.walltime}",
    ]
    if options.np and not options.ppn:
        lines.append(f"--ntasks={options.np}")
    elif ppn:
        lines.append(f"--ntasks-per-node={ppn}")
        if site and site.cores and not any("cpus" in word for word in given):
            lines.append(f"--cpus-per-task={site.cores // ppn}")
    if devices and not any("gpu" in word for word in (word for word in given if not word.startswith("--constraint"))):
        lines.append(f"--gpus-per-node={devices}")
    lines += given
    if options.walltime_margin and _by_slurm(options, "slurm"):
        # To the steps, that is to the ranks.
        lines.append(f"--signal=USR1@{options.walltime_margin:g}")
    return [*lines, "--requeue", "--open-mode=append", f"--output={options.job_name}-%j.out"]
