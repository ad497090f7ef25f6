"""Completion of command lines in bash, zsh and fish.

``wordrun --completion SHELL`` prints a script, whose function calls ``wordrun --complete`` with the words up to the
cursor. The answer is made from the schema, so it includes the user's parts, and needs neither torch nor Hydra.
"""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError, UserError
from wordrun.common.suggestions import nearest
from wordrun.config import project
from wordrun.config.registry import documentation
from wordrun.config.schema import SECTIONS, SEVERAL, schemas
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.parser import GROUPS as LAUNCH_GROUPS, OPTIONS as LAUNCH_OPTIONS
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site_files import site_files
from wordrun.launch.wordrun_command import arguments_of_wordrun
from wordrun.train.help import GROUPS, METRICS, choices

SCRIPTS = {
    "bash": r"""
_wordrun_complete() {
    local line=${COMP_LINE:0:COMP_POINT} each last shown="" words=() found=()
    read -ra words <<< "$line"
    if [[ $line == *[[:space:]] ]]; then words+=(""); fi
    while IFS=$'\t' read -r each _; do found+=("$each"); done < <(wordrun --complete "${words[@]}" 2> /dev/null)
    last=${words[${#words[@]} - 1]}
    # readline replaces only what follows the last =.
    if [[ $COMP_WORDBREAKS == *=* && $last == *=* ]]; then shown=${last%"${last##*=}"}; fi
    COMPREPLY=("${found[@]#"$shown"}")
    if [[ ${#found[@]} == 1 && ${found[0]} == *[=.] ]]; then compopt -o nospace 2> /dev/null; fi
}
complete -o default -o bashdefault -F _wordrun_complete wordrun launch
""",
    "zsh": r"""
_wordrun_complete() {
    local line name
    local -a whole whole_shown open open_shown
    for line in ${(f)"$(wordrun --complete ${(@Q)words[1,CURRENT-1]} "${(Q)PREFIX}" 2> /dev/null)"}; do
        name=${line%%$'\t'*}
        if [[ $name == *[=.] ]]; then open+=($name) open_shown+=(${line/$'\t'/  })
        else whole+=($name) whole_shown+=(${line/$'\t'/  })
        fi
    done
    if (( $#whole + $#open == 0 )); then
        compset -P '*='
        _files
        return
    fi
    compadd -l -d open_shown -S '' -a open
    compadd -l -d whole_shown -a whole
}
compdef _wordrun_complete wordrun launch
""",
    "fish": r"""
function __wordrun_complete
    set -l word (commandline -ct)
    set -l found (wordrun --complete (commandline -opc) "$word" 2> /dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        set -l key (string match -r '^.*=' -- $word)
        for path in (__fish_complete_path (string replace -r '^.*=' '' -- $word))
            echo $key$path
        end
    end
end
complete -c wordrun -c launch -f -k -a '(__wordrun_complete)'
""",
}
FLAGS = {
    "--help": "an overview, or the options of a group or command",
    "--version": "the versions of wordrun and torch",
    "--cfg": "print the config (job, hydra or all), and run nothing",
    "--multirun": "a sweep: an option with several values starts several runs",
    "--config-dir": "a folder with your config files",
    "--completion": "print the script for completion in bash, zsh or fish",
    "--setup-sh": "print the path of the shell helpers setup_python and setup_job",
}
VALUES = {"--cfg": ("job", "hydra", "all"), "--completion": tuple(SCRIPTS)}
HYDRA = {
    "hydra.run.dir=": "the run directory",
    "hydra/launcher=": "wordrun: each point of a sweep is a launch",
    "hydra/sweeper=": "wordrun_optuna: search with Optuna",
}
MODULES = {"wordrun": "train, and the other commands", "wordrun.test_dist": "a smoke test of ranks and collectives"}
COMMANDS = {"python": "", "wordrun": "train, and the other commands"}
OPTIONS = {
    "generate": "wordrun.commands.generate:GenerateConfig",
    "export": "wordrun.commands.export:ExportConfig",
    "ls": "wordrun.commands.ls:LsConfig",
    "tail": "wordrun.commands.tail:TailConfig",
    "report": "wordrun.commands.report:ReportConfig",
}
"""The options of the commands that do not take those of a run."""

Found = Iterable[tuple[str, str]]
"""What can be inserted, and its meaning."""


def script(shell: str) -> str:
    """Return the script that makes ``shell`` complete the command lines of wordrun and launch.

    Raises:
        ConfigError: there is none for this shell.
    """
    if shell not in SCRIPTS:
        raise ConfigError(f"--completion {shell}: should be {', '.join(SCRIPTS)}{nearest(shell, SCRIPTS)}")
    return SCRIPTS[shell].lstrip()


def show(words: Sequence[str], commands: Mapping[str, str]) -> None:
    """Print, a line each, what can follow: the word, a tab, its meaning. See ``complete``."""
    try:
        for word, meaning in complete(words, commands):
            print(f"{word}\t{textwrap.shorten(meaning, 60, placeholder=' ...')}")
    except UserError:  # in a user's part: a command would report it, but here it would garble the command line
        return


def complete(words: Sequence[str], commands: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what the last of ``words`` can be completed to, with the meaning; empty: the shell may offer files.

    Args:
        words: the command line up to the cursor, from ``launch`` or ``wordrun`` on; the last word may be empty.
        commands: wordrun's commands, and what they do.
    """
    program, *before, current = words if len(words) > 1 else (*words, "")
    of = _of_launch if Path(program).name == "launch" else _of_wordrun
    found = dict(of(before, current, commands))  # models share some of their options
    return [(word, meaning) for word, meaning in found.items() if word.startswith(current)]


def _of_launch(before: Sequence[str], current: str, commands: Mapping[str, str]) -> Found:
    at = 0
    while at < len(before) and before[at].startswith("-"):
        word = before[at]
        option = LAUNCH_OPTIONS.get(word)
        at += 2 if option and option.metavar else 1
        if word == "--":
            break
    if at > len(before):  # the value of the last option
        known: dict[str, Iterable[str]]
        known = {"--launcher": LAUNCHERS, "--scheduler": SCHEDULERS, "--site": site_files(os.environ)}
        return [(name, "") for name in known.get(before[-1], ())]
    command = before[at:]
    if not command and current.startswith("-"):
        options = (option for group in LAUNCH_GROUPS.values() for option in group)
        return [(name, option.help) for option in options for name in option.names]
    if not command:
        return COMMANDS.items()
    if command[-1] == "-m" and arguments_of_wordrun([*command, "wordrun"]) is not None:
        return MODULES.items()
    arguments = arguments_of_wordrun(command)
    if arguments is None or arguments[:1] == ("test_dist",):  # which has no options to complete
        return ()
    return _of_wordrun(arguments, current, commands)


def _of_wordrun(before: Sequence[str], current: str, commands: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    command = next(iter(before), "")
    last = before[-1] if before else ""
    if last in VALUES:
        yield from ((value, "") for value in VALUES[last])
    elif last in ("--help", "-h"):
        yield from ((group, "") for group in (*GROUPS, METRICS) if group != "backend")
        yield from commands.items()
    elif command in OPTIONS:
        module, _, name = OPTIONS[command].partition(":")
        yield from _options(getattr(importlib.import_module(module), name))
    elif command == "study" and last == "study":
        yield from (
            (name, about) for name, (_, about) in importlib.import_module("wordrun.commands.study").STUDIES.items()
        )
    elif command not in ("new", "sweep"):  # these take a folder
        if not before:
            yield from commands.items()
        if current.startswith("-"):
            yield from FLAGS.items()
        if command == "plan":
            yield from _options(importlib.import_module("wordrun.plan.options").PlanConfig, "plan.")
        yield from _overrides(current)


def _overrides(current: str) -> Iterator[tuple[str, str]]:
    """Yield config groups and, once the group is typed, its options or the names that can be chosen."""
    key, equals, value = current.partition("=")
    section = key.partition(".")[0]
    if equals:
        yield from ((f"{key}={name}", "") for name in _values(key, value))
    elif "." in key and section in SECTIONS:
        for name, part in schemas(section).items():
            yield from _options(part.options, f"{section}.{name}." if section in SEVERAL else f"{section}.")
    else:
        for group in GROUPS:
            if group != "backend":
                yield f"{group}=", f"choose {group}"
            if group in SECTIONS:
                yield f"{group}.", f"options of {group}"
        yield from HYDRA.items()


def _values(key: str, value: str) -> Iterator[str]:
    """Yield the values of an option, if they can be listed; those of a list with the elements typed so far."""
    group = "backend" if key == "train.backend" else key
    if group in GROUPS:
        start = max(value.rfind("["), value.rfind(",")) + 1
        folder = project.here().conf
        yield from (f"{value[:start]}{name}" for name in choices(group, [folder] if folder else []))
    elif key.partition(".")[0] in SECTIONS:
        section, _, name = key.rpartition(".")
        group, _, chosen = section.partition(".")
        for part in (part for own, part in schemas(group).items() if chosen in ("", own)):
            if any(option.name == name and "bool" in str(option.type) for option in fields(part.options)):
                yield from ("true", "false")
                return


def _options(cls: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    meanings = documentation(cls)
    yield from ((f"{prefix}{option.name}=", meanings[option.name]) for option in fields(cls))
