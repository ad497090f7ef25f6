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
# Not an environment of anyone's: put first in PATH after a site's modules it would hide what they bring.
SYSTEM = ("/usr", "/usr/local")


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
    problems = _problems(options, site, scheduler)
    if problems:
        raise ConfigError("\n".join(problems))
    options = replace(options, walltime_margin=margin(options))
    directives = (_pbs if scheduler == "pbs" else _slurm)(options, site)
    mark = "#PBS" if scheduler == "pbs" else "#SBATCH"
    lines = [
        # A login shell: without it many sites have no `module`.
        "#!/bin/bash --login",
        f"# {' '.join(site.description.split()) if site else 'an unknown cluster'}; written by launch --submit",
        *(f"{mark} {directive}" for directive in directives),
        "",
        f"cd {shlex.quote(place.cwd)} || exit",
    ]
    modules = site.modules if site else ()
    # What a module's script returns is nobody's business; setup_python checks that it took effect.
    activation, home = _environment(place.prefix, bool(modules))
    lines += [*modules, *activation]
    if place.setup:
        setup_python = f"setup_python {shlex.quote(home)}" if home else "setup_python"
        lines.append(f"source {shlex.quote(place.setup)} && {setup_python} && setup_job || exit")
    lines += [f"export WORDRUN_RUN_ID={shlex.quote(run_id)}", "export WORDRUN_RESUME=auto"]
    return "\n".join([*lines, "", *_ending(options, scheduler), ""])


def _environment(prefix: str, modules: bool) -> tuple[list[str], str]:
    """Return the lines that make ``prefix`` the Python environment, and what setup_python has to be told of it.

    Args:
        prefix: the environment that launch was called from.
        modules: whether the site's modules are loaded before.
    """
    quoted, path = shlex.quote(prefix), f"PATH={shlex.quote(os.path.join(prefix, 'bin'))}:$PATH"
    if os.path.isdir(os.path.join(prefix, "conda-meta")):
        # A batch shell often has no `conda`, and the environment's own scripts are run only by it.
        return [f"conda activate {quoted} 2>/dev/null || export {path} CONDA_PREFIX={quoted}"], prefix
    if os.path.isfile(os.path.join(prefix, "bin", "activate")):
        return [f"source {shlex.quote(os.path.join(prefix, 'bin', 'activate'))}"], ""
    there = os.path.isfile(os.path.join(prefix, "bin", "python"))
    if modules and (prefix in SYSTEM or not there):
        return [], ""
    return [f"export {path}"], prefix if there else ""


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


def command(scheduler: str, path: str, previous: str | None) -> list[str]:
    """Return the command that submits the script ``path``, to begin when the job ``previous`` has ended."""
    if scheduler == "pbs":
        return ["qsub", *(["-W", f"depend=afterany:{previous}"] if previous else []), path]
    return ["sbatch", "--parsable", *([f"--dependency=afterany:{previous}"] if previous else []), path]


def write(path: str, text: str) -> None:
    """Write the job script ``text`` to ``path``, making its folders.

    Raises:
        ConfigError: that cannot be.
    """
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except OSError as error:
        parents = (os.path.dirname(folder), folder)
        in_the_way = [name for name in parents if os.path.lexists(name) and not os.path.isdir(name)]
        why = f"{in_the_way[0]} is no folder; move it away" if in_the_way else error.strerror
        raise ConfigError(
            f"cannot write the job script {path}: {why}, or call launch from another folder (this is {os.getcwd()})"
        ) from None


def commands(scheduler: str, path: str, jobs: Sequence[str]) -> list[list[str]]:
    """Return the command of each of ``jobs``, which begin one after the other."""
    return [command(scheduler, path, previous) for previous in (None, *jobs[:-1])]


def submit(scheduler: str, path: str, chain: int, env: Mapping[str, str]) -> list[str]:
    """Submit the script ``chain`` times, each job after the one before it; return the jobs' ids.

    Raises:
        SubmitError: the scheduler refuses, with its own words.
    """
    import subprocess

    jobs: list[str] = []
    for _ in range(chain):
        words = command(scheduler, path, jobs[-1] if jobs else None)
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


def _nodes(options: Options, site: Site | None) -> int:
    """Return the nodes: -N, or the fewest that hold -n ranks, one for each device where these are known."""
    if options.nodes:
        return options.nodes
    ppn = options.ppn or options.gpus
    if site and not ppn and not site.queues.get(options.queue or "", {}).get("device_per_rank"):
        ppn = site.ranks_per_node or site.devices
    return -(-options.np // ppn) if options.np and ppn else 1


def _per_node(options: Options, site: Site | None) -> int:
    """Return the ranks of a node, as far as they are asked for."""
    return options.ppn or -(-(options.np or 1) // _nodes(options, site))


def _problems(options: Options, site: Site | None, scheduler: str) -> list[str]:
    problems = []
    if options.walltime is None:
        problems.append("--submit needs --walltime H:MM:SS")
    np, nodes, ppn = options.np, _nodes(options, site), options.ppn
    if np and ppn and np != nodes * ppn:
        # The launch inside would say so after a night in the queue.
        problems.append(f"-n {np} on {nodes} nodes is not --ppn {ppn}; leave one of -n, -N and --ppn out")
    if site is None:
        return problems
    wishes = site.submit
    problems += _part_of_a_node(options, site, scheduler)
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
        asked = f"-N {nodes}" if options.nodes else f"{nodes} nodes (for -n {np})"
        problems.append(f"{asked}: {site.name}'s queue {options.queue} takes {least} to {most} nodes")
    hours = queue.get("hours", float("inf"))
    jobs = "jobs"
    if isinstance(hours, Mapping):
        hours, jobs = _hours(hours, nodes), f"jobs of {nodes} node{'s' * (nodes > 1)}"
    if options.walltime and seconds(options.walltime) > 3600 * hours:
        problems.append(
            f"--walltime {options.walltime}: {site.name}'s queue {options.queue} ends {jobs} after {hours} h"
        )
    return problems


def _hours(limits: Mapping[int, float], nodes: int) -> float:
    """Return the hours that a job of ``nodes`` may have, of a table of most nodes and hours."""
    return next((hours for most, hours in sorted(limits.items()) if nodes <= most), float("inf"))


def _part_of_a_node(options: Options, site: Site, scheduler: str) -> list[str]:
    """Return what the site has against --gpus and --cores."""
    problems = []
    queue = site.queues.get(options.queue or "", {})
    for name, asked, has, what, word in (
        ("--gpus", options.gpus, site.devices, "GPUs", "gpu"),
        ("--cores", options.cores, site.cores, "cores", "cpus"),
    ):
        if asked is None or asked == has:
            continue
        fixed = [line for line in site.submit.get("directives", []) if word in line and "--constraint" not in line]
        if has is not None and asked > has:
            problems.append(f"{name} {asked}: a node of {site.name} has {has or 'no'} {what}")
        elif scheduler == "pbs" and "select" in site.submit and not (word == "gpu" and queue.get("device_per_rank")):
            problems.append(
                f"{name} {asked}: the file of {site.name} says what jobs have of a node (submit.select); "
                f"leave {name} out, or change it in a file of your own (--site FILE)"
            )
        elif scheduler == "slurm" and fixed and not any("{devices}" in line for line in fixed):
            problems.append(
                f"{name} {asked}: the file of {site.name} says {fixed[0]} (submit.directives); "
                f"leave {name} out, or change it in a file of your own (--site FILE)"
            )
    return problems


def _pbs(options: Options, site: Site | None) -> Sequence[str]:
    wishes = site.submit if site else {}
    queue = site.queues.get(options.queue or "", {}) if site else {}
    filesystems = options.filesystems or wishes.get("filesystems")
    return [
        f"-N {options.job_name}",
        *([f"-A {options.account}"] if options.account else []),
        *([f"-q {options.queue}"] if options.queue else []),
        f"-l select={_select(options, site)}",
        f"-l walltime={_pbs_time(options.walltime or '')}",
        *([f"-l filesystems={filesystems}"] if filesystems else []),
        *wishes.get("directives", []),
        "-j oe",
        f"-r {'y' if queue.get('rerunnable') else 'n'}",
    ]


def _select(options: Options, site: Site | None) -> str:
    """Return PBS's chunks: as the site's file writes them, else with what is known of a node."""
    queue = site.queues.get(options.queue or "", {}) if site else {}
    own = site.submit.get("select", "") if site else ""
    each = (options.gpus or _per_node(options, site)) if queue.get("device_per_rank") else 1
    words = [f"{_nodes(options, site) * each}", *([own] if own else [])]
    if not queue.get("device_per_rank") and not (site and "select" in site.submit):
        gpus = options.gpus or (site.devices if site else None)
        wanted = {
            "ncpus": options.cores or (site.cores if site else None),
            "ngpus": gpus,
            "mpiprocs": _per_node(options, site) if options.ppn or options.np else gpus,
        }
        words += [f"{name}={count}" for name, count in wanted.items() if count]
    return ":".join(words)


def _pbs_time(walltime: str) -> str:
    """Return ``[D-]H:MM:SS`` without days, which PBS does not know."""
    days, _, rest = walltime.rpartition("-")
    hours, _, minutes = rest.partition(":")
    return f"{24 * int(days) + int(hours)}:{minutes}" if days else walltime


def _slurm(options: Options, site: Site | None) -> Sequence[str]:
    wishes = site.submit if site else {}
    queue = site.queues.get(options.queue or "", {}) if site else {}
    devices = (site.devices if site else None) or (_per_node(options, site) if queue.get("device_per_rank") else 0)
    cores = options.cores or (site.cores if site else None)
    if options.gpus:
        if site and site.devices and site.cores and not options.cores:
            cores = site.cores * options.gpus // site.devices
        devices = options.gpus
    ppn = options.ppn or devices
    given = [fill(word, devices=devices) for word in wishes.get("directives", []) if devices or "{devices}" not in word]
    lines = [
        f"--job-name={options.job_name}",
        *([f"--account={options.account}"] if options.account else []),
        *([f"{wishes.get('queue_option', '--partition')}={options.queue}"] if options.queue else []),
        f"--nodes={_nodes(options, site)}",
        f"--time={options.walltime}",
    ]
    if options.np and not options.ppn:
        lines.append(f"--ntasks={options.np}")
        ppn = _per_node(options, site) if options.cores else 0
    elif ppn or options.cores:
        lines.append(f"--ntasks-per-node={ppn or 1}")
        ppn = ppn or 1
    if ppn and cores and not any("cpus" in word for word in given):
        lines.append(f"--cpus-per-task={max(1, cores // ppn)}")
    if devices and not any("gpu" in word for word in (word for word in given if not word.startswith("--constraint"))):
        lines.append(f"--gpus-per-node={devices}")
    lines += given
    if options.walltime_margin and _by_slurm(options, "slurm"):
        # To the steps, that is to the ranks.
        lines.append(f"--signal=USR1@{options.walltime_margin:g}")
    return [*lines, "--requeue", "--open-mode=append", f"--output={options.job_name}-%j.out"]
