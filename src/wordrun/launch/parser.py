"""The command line of ``launch``: one table of options, used by the parser and ``--help``."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import LAUNCH, nearest
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.options import Options
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.walltime import seconds

# How often --elastic restarts ranks, without --retries.
ELASTIC_RETRIES = 10
# The launcher gives each rank its own values of these, so a single value for all ranks is always wrong.
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError("should be a whole number, at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError("should be a positive number of seconds")
    return seconds


def _seconds_or_0(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _walltime(text: str) -> str:
    seconds(text)
    return text


def _matching(pattern: str, meaning: str) -> Callable[[str], str]:
    """Return a parser of text copied into a directive, where a space or newline would begin another option."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"should be {meaning}")
        return text

    return read


# The job name is also part of file names.
_job_name = _matching(r"[A-Za-z0-9][\w.+-]{0,99}", "up to 100 letters, digits and . _ + -, the first a letter or digit")
_name = _matching(r"\w[\w.+@:/-]*", "a name of letters, digits and . _ + - @ : /")
_names = _matching(r"\w[\w.+@:/,-]*", "one or more names, separated by commas, of letters, digits and . _ + - @ : /")
_filesystems = _matching(r"\w[\w.+-]*(:\w[\w.+-]*)*", "names separated by colons, such as home:eagle")


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not name.isascii():
        raise ValueError("should be NAME=VALUE")
    if name in RANK_NAMES:
        raise ValueError(f"cannot be set: launch sets {name} for each rank (see -n, -N and --ppn)")
    return name, value


def _words(text: str) -> tuple[str, ...]:
    import shlex

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"cannot be split into arguments: {error}") from None


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"should be one of {', '.join(names)}{nearest(text, names)}")
        return text

    return read


@dataclass(frozen=True)
class Option:
    """One option: how it is typed, parsed and documented."""

    names: tuple[str, ...]
    field: str
    help: str
    metavar: str = ""
    """Name of the value in ``--help``; empty for a switch."""
    read: Callable[[str], Any] = str
    repeat: bool = False


MARGIN = "send SIGUSR1 to the ranks S seconds before the time limit (0: never; wordrun jobs: 120)"
GROUPS: dict[str, tuple[Option, ...]] = {
    "Number of ranks (any two determine the third; default: one rank per GPU, or a single process)": (
        Option(("-n", "--np"), "np", "total number of ranks", "N", _count),
        Option(("-N", "--nodes"), "nodes", "number of nodes", "N", _count),
        Option(("--ppn",), "ppn", "ranks per node", "N", _count),
    ),
    "How ranks are started": (
        Option(("--oversubscribe",), "oversubscribe", "start the ranks even if cores or memory are insufficient"),
        Option(("--launcher",), "launcher", f"start the ranks with {', '.join(LAUNCHERS)}", "NAME", _one_of(LAUNCHERS)),
        Option(("--env",), "env", "set a variable for every rank (repeatable)", "K=V", _setting, repeat=True),
        Option(("--cpu-bind",), "cpu_bind", "CPU binding, in the launcher's own syntax", "S"),
        Option(("--launcher-args",), "launcher_args", "extra arguments for mpiexec, srun or torchrun", '"..."', _words),
        Option(("--idle-timeout",), "idle_timeout", "stop the job after S seconds without output", "S", _seconds),
        Option(
            ("--hang",),
            "hang",
            "stop the job when a rank has waited S seconds for another one, and print where each rank is",
            "S",
            _seconds,
        ),
        Option(
            ("--retries",),
            "retries",
            "relaunch up to N times after a failure of a node or the network, or if a signal kills a rank",
            "N",
            _count,
        ),
        Option(
            ("--elastic",),
            "elastic",
            "restart all ranks in place when one is killed, up to 10 times (with --retries N: up to N times)",
        ),
        Option(("--no-preimport",), "no_preimport", "with --elastic, import torch in each rank, not once per node"),
        Option(
            ("--spare-nodes",),
            "spare_nodes",
            "hold back N nodes, which replace failed ones under --retries or --elastic",
            "N",
            _count,
        ),
        Option(("--walltime-margin",), "walltime_margin", MARGIN, "S", _seconds_or_0),
        Option(
            ("--scheduler",),
            "scheduler",
            f"scheduler of this job: {', '.join(SCHEDULERS)}",
            "NAME",
            _one_of(SCHEDULERS),
        ),
        Option(("--hostfile",), "hostfile", "hosts to use, one per line (in a job: some of the job's hosts)", "FILE"),
        Option(("--site",), "site", "site file to use: the name of a known site, or the path of a YAML file", "NAME"),
    ),
    "Submitting a job (--submit writes a job script that runs launch, and passes it to qsub or sbatch)": (
        Option(("--submit",), "submit", "submit a job instead of running here (with --dry-run: only print its script)"),
        Option(("--walltime",), "walltime", "time limit, H:MM:SS", "T", _walltime),
        Option(("--queue",), "queue", "queue, partition or QOS", "Q", _names),
        Option(("--account",), "account", "account to charge", "A", _name),
        Option(("--job-name",), "job_name", "job name (default: wordrun)", "J", _job_name),
        Option(("--filesystems",), "filesystems", "PBS: required file systems, such as home:eagle", "F", _filesystems),
        Option(("--gpus",), "gpus", "GPUs per node (default: all, where the site is known)", "N", _count),
        Option(("--cores",), "cores", "cores per node (default: all, where the site is known)", "N", _count),
        Option(("--chain",), "chain", "submit N dependent jobs, each starting when the previous one ends", "N", _count),
        Option(("--no-freeze",), "no_freeze", "run the code as it is when the job starts, not a copy made now"),
    ),
    "Inspection": (
        Option(("--dry-run",), "dry_run", "print what would run, and why, without running it"),
        Option(("--info",), "info", "print the detected job, hosts, devices, launcher and python"),
        Option(("--doctor",), "doctor", "run a probe on all ranks and report problems with their remedies"),
        Option(
            ("--stacks",),
            "stacks",
            "print the source line that each rank of a running job is at (also: send SIGQUIT to launch)",
            "RUN",
        ),
        Option(("--json",), "json", "print --dry-run, --info, --doctor or --submit as JSON"),
        Option(("-h", "--help"), "help", "show the common options; --help all: all options"),
        Option(("--version",), "version", "show the version"),
    ),
}
OPTIONS = {name: option for group in GROUPS.values() for option in group for name in option.names}
ESSENTIAL = {"np", "nodes", "ppn", "retries", "submit", "account", "queue", "walltime", "chain"}
ESSENTIAL |= {"dry_run", "doctor", "help"}
"""Fields of the options that ``launch --help`` shows without ``all``."""
_RANKS, _START, SUBMISSION, _ = GROUPS.values()
# A short option with its value, as in -N2.
ATTACHED = re.compile(r"(-[nN])=?(\d.*)")
# Options passed on to the launch inside a submitted job.
INNER = (*_RANKS, *_START)

USAGE = "usage: launch [options] [--] COMMAND..."
EXAMPLES = """
Start COMMAND as N distributed ranks. Scripts that run under torchrun run
unchanged: each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
NODE_RANK, MASTER_ADDR and MASTER_PORT in its environment.

  launch -n 2 python -m wordrun data=shakespeare    two ranks on this machine
  launch --dry-run -n 4 python train.py --epochs 3  show what would run, and why
  launch --retries 2 python train.py                relaunch after a lost node
  launch --submit -N 2 --walltime 1:00:00 -- python -m wordrun     submit a job

COMMAND begins at the first argument that is not an option of launch; everything
after it belongs to COMMAND."""
STATUS = """
Exit status: that of the first rank to fail (128 + N for signal N), 2 for an
invalid option, 75 for a run that was asked to stop, has saved and can be
resumed, 124 after --idle-timeout or --hang, 126 or 127 for a COMMAND that
cannot be run or found, 130 after Ctrl-C."""


def help_text(*, complete: bool = True) -> str:
    """Return what ``launch --help all`` prints; not ``complete``: what ``launch --help`` prints."""
    lines = [USAGE, EXAMPLES]
    columns = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 110)
    for title, options in GROUPS.items():
        group = [option for option in options if complete or option.field in ESSENTIAL]
        lines += ["", *textwrap.wrap(f"{title}:", columns)]
        for option in group:
            left = f"  {', '.join(option.names)} {option.metavar}".rstrip()
            text = textwrap.wrap(option.help, columns - 26, break_on_hyphens=False)
            lines += [f"{each:<24}  {line}" for each, line in zip_longest([left], text, fillvalue="")]
    return "\n".join([*lines, STATUS if complete else "\nlaunch --help all shows all options and the exit statuses."])


def parse(words: Sequence[str]) -> Options:
    """Parse ``words``, the command line without ``launch``.

    Parsing stops at the first argument that is not an option, so COMMAND's own flags are never read here.

    Raises:
        ConfigError: names every invalid option.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        attached = ATTACHED.fullmatch(word)
        name, equals, value = (attached[1], "=", attached[2]) if attached else word.partition("=")
        option = OPTIONS.get(name)
        if option is None:
            meant = f"; did you mean '{LAUNCH[name]}'?" if name in LAUNCH else nearest(name, OPTIONS)
            problems.append(f"unknown option '{name}'{meant} (launch --help lists the options)")
            break  # it may take a value, so it is unclear where COMMAND begins
        if not option.metavar:
            if equals:
                problems.append(f"{name} takes no value")
            values[option.field] = True
            continue
        if not equals:
            if not rest or rest[0] == "--":
                problems.append(f"{name} needs a value: {name} {option.metavar}")
                break
            value = rest.pop(0)
        try:
            read = option.read(value)
        except ValueError as error:
            shown = value if value.isprintable() and value and " " not in value else repr(value)
            problems.append(f"{name} {shown}: {error}" if option.repeat else f"{name} {shown} {error}")
            continue
        values[option.field] = (*values.get(option.field, ()), read) if option.repeat else read
    if problems:
        raise ConfigError("\n".join(problems))
    options = Options(**values, typed=tuple(words[: len(words) - len(rest)]), command=tuple(rest))
    if options.elastic and "retries" not in values:
        options = replace(options, retries=ELASTIC_RETRIES)
    if options.json and not (options.dry_run or options.info or options.doctor or options.submit):
        raise ConfigError("--json requires --dry-run, --info, --doctor or --submit")
    if not options.submit:
        given = [name for name, option in OPTIONS.items() if option in SUBMISSION and option.field in values]
        if given:
            raise ConfigError(f"{', '.join(given)}: only for jobs; add --submit")
    return options
