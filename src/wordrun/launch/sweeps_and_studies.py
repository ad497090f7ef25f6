"""Commands that call launch themselves, for each point of a sweep or study.

``launch --submit`` passes its options on to the launches of the points; ``launch`` without it rejects a study.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from wordrun.common.errors import ConfigError
from wordrun.launch.options import Options

ARGS = "hydra.launcher.args"
# Why these options cannot reach the points.
NOT_FOR_POINTS = {
    "elastic": ("--elastic", "starts guardians for a single run"),
    "spare_nodes": ("--spare-nodes", "holds nodes back from a single run"),
}


def what(options: Options) -> str:
    """Return "a study" or "a sweep", for messages."""
    return "a study" if options.studies else "a sweep"


def problems(options: Options) -> Iterator[str]:
    """Yield what is wrong with the options of a job that runs a sweep or a study."""
    for field, (name, does) in NOT_FOR_POINTS.items():
        if options.launches_points and getattr(options, field):
            yield f"{name} {does}, but {what(options)} launches each point itself: leave it out"


def reject_study_on_ranks(options: Options) -> None:
    """Check that the command is not a study, which is not started as ranks.

    Raises:
        ConfigError: the command is a study; the message has the two ways to start it.
    """
    if options.studies and not options.submit:
        command = shlex.join(options.command)
        given = shlex.join(options.typed[:-1] if options.typed[-1:] == ("--",) else options.typed)
        submitted = " ".join(filter(None, ["launch --submit --walltime H:MM:SS", given, "--", command]))
        here = f"a study launches its points itself, so call it without launch\n  {command}"
        raise ConfigError(f"{here}\nor submit it as a job\n  {submitted}")


def command(options: Options, passed: Sequence[str]) -> list[str]:
    """Return the command of a sweep or a study with the options ``passed`` for the launches of its points.

    Options that the command has for them already come later, so that they take precedence.
    """
    words = list(options.command)
    if not passed or options.command_name == "sweep":  # a job of a sweep, whose folder has the options
        return words
    if options.studies:
        return _with_launch(words, passed)
    at = next((at for at, word in enumerate(words) if word.lstrip("+").startswith(f"{ARGS}=")), None)
    if at is None:
        return [*words, f"{ARGS}={quoted(shlex.join(passed))}"]
    name, _, own = words[at].partition("=")
    words[at] = f"{name}={quoted(f'{shlex.join(passed)} {unquoted(own)}'.rstrip())}"
    return words


def _with_launch(words: list[str], passed: Sequence[str]) -> list[str]:
    """Return the command of a study with further options of launch in its ``--launch``."""
    for at in reversed(range(len(words))):
        name, equals, own = words[at].partition("=")
        if name == "--launch" and equals:
            return [*words[:at], f"--launch={shlex.join(passed)} {own}", *words[at + 1 :]]
        if name == "--launch" and at + 1 < len(words):
            return [*words[:at], f"--launch={shlex.join(passed)} {words[at + 1]}", *words[at + 2 :]]
    return [*words, f"--launch={shlex.join(passed)}"]


def for_points(options: Options) -> Options:
    """Return ``options`` without the size of the job, since points have their own size.

    The number of ranks per node is kept for points whose size is a number of nodes.
    """
    own = {word.lstrip("+").partition("=")[0] for word in options.command}
    by_nodes = "--nodes" in own if options.studies else "hydra.launcher.nodes" in own
    has_own = {"hydra.launcher.np", "hydra.launcher.ppn", "--ranks"} & own
    return replace(options, np=None, nodes=None, ppn=options.ppn if by_nodes and not has_own else None)


def note(options: Options) -> str:
    """Return a note about options of a submission that surprisingly do not apply to the points; empty: none."""
    given = [f"{name} {value}" for name, value in (("-n", options.np), ("--ppn", options.ppn)) if value]
    if not options.launches_points or options.command_name == "sweep" or not given:
        return ""
    if options.np is None and for_points(options).ppn:
        return ""
    own = "--ranks or --nodes" if options.studies else "hydra.launcher.np, nodes and ppn"
    return f"{' '.join(given)} is the size of the job: the points of {what(options)} have the size that {own} give"


def quoted(text: str) -> str:
    """Return ``text`` as a value for Hydra, to be read as it is: in quotes if it has unusual characters."""
    if re.fullmatch(r"[\w./+@:-]*/[\w./+@:-]*", text, re.ASCII):
        return text
    escaped = re.sub(r'(\\*)("|\$\{|$)', lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), text)
    return f'"{escaped}"'


def unquoted(text: str) -> str:
    """Return the text that a value for Hydra, with or without quotes around it, stands for."""
    quote = text[:1]
    if len(text) < 2 or quote not in ("'", '"') or text[-1] != quote:
        return text
    return re.sub(rf"(\\+)({quote}|\$\{{|$)", lambda found: found[1][: len(found[1]) // 2] + found[2], text[1:-1])
