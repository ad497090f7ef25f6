"""``KEY=VALUE`` command lines for commands that define their options as a dataclass."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any, TypeVar

from wordrun.common.errors import ConfigError, UserError, as_whole, show
from wordrun.common.section import Section, value_text
from wordrun.common.suggestions import nearest
from wordrun.common.validation import too_large
from wordrun.config.registry import documentation

Options = TypeVar("Options")
Checked = TypeVar("Checked", bound=Section)
TYPES: dict[str, tuple[Any, str]] = {"int": (int, "a whole number"), "float": (float, "a number"), "str": (str, "text")}


def run(cls: type[Checked], usage: str, action: Callable[[Checked], None], argv: Sequence[str] | None) -> int:
    """Call ``action`` with the options of ``cls`` in ``argv`` (default: the command line); return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print("\n".join([usage, "Options:", *describe(cls())]))
        return 0
    try:
        options, _ = parse(cls, arguments)
        if problems := list(options.problems()):
            raise ConfigError("\n".join(problems))
        action(options)
    except UserError as error:
        return show(error)
    return 0


def with_first(argv: Sequence[str] | None, key: str) -> list[str]:
    """Return the arguments (default: the command line).

    A first argument that is neither KEY=VALUE nor a flag becomes the value of ``key``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        arguments[0] = f"{key}={arguments[0]}"
    return arguments


def parse(cls: type[Options], arguments: Sequence[str], prefix: str = "") -> tuple[Options, list[str]]:
    """Parse ``arguments`` into an instance of ``cls``; also return those that do not begin with ``prefix``.

    Args:
        cls: a dataclass whose fields are int, float or str, each possibly ``| None``; ``FORMER`` maps older names to
            their fields.
        arguments: such as ``length=20``.
        prefix: prefix of the option names.

    Raises:
        ConfigError: if there are unknown options or values of the wrong type; the message names all of them.
    """
    declared = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    options, others, problems = cls(), [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not key.startswith(prefix):
            others.append(argument)
            continue
        name = key.removeprefix(prefix)
        field = declared.get(getattr(cls, "FORMER", {}).get(name, name))
        if field is None:
            remedy = nearest(key.removeprefix(prefix), declared, prefix) or "; --help lists the options"
            problems.append(f"unknown option '{key}'{remedy}")
            continue
        kind, _, optional = str(field.type).partition(" ")
        convert, wanted = TYPES[kind]
        if not (equals and value):
            problems.append(f"{argument} has no value: write {key}=VALUE")
        elif value == "null" and (optional or kind != "str"):
            setattr(options, field.name, None if optional else field.default)
        else:
            try:
                setattr(options, field.name, convert(value))
            except ValueError:
                written = as_whole(value) if convert is int else ""
                problems.append(f"{argument}{written}" if written else f"{argument} should be {wanted}")
                continue
            if convert is int and (problem := too_large(key, getattr(options, field.name))):
                problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))
    return options, others


def describe(options: Any, prefix: str = "", width: int = 24) -> list[str]:
    """Return lines that show the name, value and meaning of each of ``options``, as wide as ``help_width``."""
    lines: list[str] = []
    for option in fields(options):
        value = value_text(getattr(options, option.name)).replace("\n", r"\n")
        setting = f"{prefix}{option.name}={value if len(value) <= 90 else value[:87] + '...'}"
        columns = help_width() - 2 - width
        meaning = textwrap.wrap(documentation(type(options))[option.name], columns, break_on_hyphens=False)
        if len(setting) >= width:
            lines.append(f"  {setting}")
            setting = ""
        lines += [f"  {left:<{width}}{right}" for left, right in zip_longest([setting], meaning, fillvalue="")]
    return lines


def help_width() -> int:
    """Return the columns of a help text: those of the terminal, from 60 to 110."""
    return min(max(shutil.get_terminal_size((110, 24)).columns, 60), 110)
