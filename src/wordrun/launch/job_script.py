"""The text of the job script of ``launch --submit``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from wordrun.common.errors import REQUEUE, ConfigError
from wordrun.launch import limits, sweeps_and_studies
from wordrun.launch.code_snapshot import CodeSnapshot
from wordrun.launch.options import Options
from wordrun.launch.parser import INNER
from wordrun.launch.schedulers.base import Scheduler
from wordrun.launch.site import Site
from wordrun.launch.walltime import default_margin

# A Python in these folders is the system's, not an environment. First in PATH, it would hide a site's modules.
SYSTEM = ("/usr", "/usr/local")
# Variables of the submitting shell that a job needs, too; secrets are never among them. FOLDERS have paths as values.
FOLDERS = ("WORDRUN_DATA_HOME", "HF_HOME", "TIKTOKEN_CACHE_DIR", "WANDB_DIR")
CARRIED = (*FOLDERS, "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY")


@dataclass(frozen=True)
class Origin:
    """Where a job script runs, and its Python environment."""

    cwd: str
    prefix: str
    """The Python environment with wordrun."""
    setup: str
    """The repository's bin/setup.sh; empty: there is none."""
    finished: str = ""
    """The file that a job of a chain creates after its command has ended with 0: then the later jobs do nothing."""
    snapshot: CodeSnapshot | None = None
    """The copy of the code to run; None: the original."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment of the submitting shell."""


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
    problems = limits.problems(options, site, scheduler)
    if problems:
        raise ConfigError("\n".join(problems))
    options = replace(options, walltime_margin=default_margin(options))
    lines = [
        # A login shell: many sites define `module` only there.
        "#!/bin/bash --login",
        f"# {' '.join(site.description.split()) if site.name else 'an unknown cluster'}; written by launch --submit",
        *(f"{scheduler.directive} {directive}" for directive in scheduler.directives(options, site)),
        "",
    ]
    first = len(lines)
    lines += [
        f"cd {shlex.quote(origin.snapshot.cwd if origin.snapshot else origin.cwd)} || exit",
    ]
    # Exit statuses of module commands are unreliable; setup_python checks that they took effect.
    activation, home = _environment(origin.prefix, bool(site.modules))
    lines += [*site.modules, *activation, *_carried(origin)]
    if origin.setup:
        setup_job = ["setup_job", *passed_on(options, scheduler)]
        setup_python = f"setup_python {shlex.quote(home)}" if home else "setup_python"
        lines.append(f"source {shlex.quote(origin.setup)} && {setup_python} && {shlex.join(setup_job)} || exit")
    if origin.snapshot:
        path = f"{shlex.quote(os.pathsep.join(origin.snapshot.path))}${{PYTHONPATH:+:$PYTHONPATH}}"
        lines += [f"export PYTHONPATH={path}"] * bool(origin.snapshot.path)
        lines.append(f"export WORDRUN_CODE={shlex.quote(origin.snapshot.record)}")
    lines += [f"export WORDRUN_RUN_ID={shlex.quote(run_id)}", "export WORDRUN_RESUME=auto"]
    end = _ending(options, scheduler)
    if options.chain > 1:
        lines[first:first] = [
            f"finished={shlex.quote(origin.finished)}",
            'if [ -e "$finished" ]; then',
            '  echo "nothing to do: an earlier job of the chain ended with 0 (to run it again, remove $finished)"',
            "  exit 0",
            "fi",
        ]
        end.insert(-1, '[ -n "${saved-}" ] || [ "$status" -ne 0 ] || : >"$finished"')
    return "\n".join([*lines, "", *end, ""])


def _carried(origin: Origin) -> list[str]:
    """Return the lines that set variables of the submitting shell, which jobs may lack (SLURM: SBATCH_EXPORT)."""
    given = {name: origin.env[name] for name in CARRIED if origin.env.get(name)}
    # The job may run in a copy of the folder, in which a relative path would be another one.
    folders = {name: os.path.join(origin.cwd, path) for name, path in given.items() if name in FOLDERS}
    return [f"export {name}={shlex.quote(text)}" for name, text in {**given, **folders}.items()]


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


def _ending(options: Options, scheduler: Scheduler) -> list[str]:
    """Return the lines that run the launch and, if it has saved, continue its run."""
    if options.launches_points:
        run = sweeps_and_studies.command(options, passed_on(sweeps_and_studies.for_points(options), scheduler))
    else:
        run = inner(options, scheduler)
    echo = 'echo "saved: the next job of the chain resumes the run (after the last one, submit this script again)"'
    continuing = (echo, "status=0", "saved=yes") if options.chain > 1 else scheduler.continuing
    return [
        f"# {scheduler.canceller} and the time limit signal this shell too: then the ranks save, and the job is over",
        "trap 'ending=yes' TERM",
        shlex.join(run),
        "status=$?",
        f'if [ "$status" -eq {REQUEUE} ] && [ -z "${{ending-}}" ]; then',
        *(f"  {line}" for line in continuing),
        "fi",
        'exit "$status"',
    ]


def inner(options: Options, scheduler: Scheduler) -> list[str]:
    """Return the launch command that the script runs: with all options except the submission's."""
    checks = ["--doctor"] if options.doctor else []
    return ["launch", *passed_on(options, scheduler), *checks, *(["--", *options.command] if options.command else [])]


def passed_on(options: Options, scheduler: Scheduler) -> list[str]:
    """Return the options of the launch inside the job."""
    words: list[str] = []
    for option in INNER:
        value = getattr(options, option.field)
        if not value or (option.field == "walltime_margin" and scheduler.sends_warning(options)):
            continue
        if option.field == "env":
            words += [word for name, text in value for word in (option.names[-1], f"{name}={text}")]
        elif value is True:
            words.append(option.names[0])
        else:
            text = f"{value:.15g}" if isinstance(value, float) else f"{value}"
            words += [option.names[0], shlex.join(value) if isinstance(value, tuple) else text]
    return words
