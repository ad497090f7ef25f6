"""Command lines of ``KEY=VALUE`` words for commands whose options are one dataclass."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from wordrun.config import documentation
from wordrun.errors import ConfigError, nearest

Options = TypeVar("Options")
KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"), "float": (float, "a number"), "str": (str, "a text"),
}  # fmt: skip


def parse(cls: type[Options], words: Sequence[str], prefix: str = "") -> tuple[Options, list[str]]:
    """Return the options of ``cls`` among ``words``, and the words that do not begin with ``prefix``.

    Args:
        cls: a dataclass whose fields are int, float, str, or one of these or None.
        words: such as ``length=20``.
        prefix: what the options' names begin with.

    Raises:
        ConfigError: names every unknown option and every value of a wrong type.
    """
    declared = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    options, others, problems = cls(), [], []
    for word in words:
        key, equals, value = word.partition("=")
        if not key.startswith(prefix):
            others.append(word)
            continue
        field = declared.get(key.removeprefix(prefix))
        if field is None:
            problems.append(f"unknown option '{key}'{nearest(key.removeprefix(prefix), declared, prefix)}")
            continue
        kind, _, rest = str(field.type).partition(" ")
        make, wanted = KINDS[kind]
        if not (equals and value):
            problems.append(f"{word} has no value: write {key}=VALUE")
        elif value == "null" and (rest or kind != "str"):
            setattr(options, field.name, None if rest else field.default)
        else:
            try:
                setattr(options, field.name, make(value))
            except ValueError:
                problems.append(f"{word} should be {wanted}")
    if problems:
        raise ConfigError("\n".join(problems))
    return options, others


def describe(cls: type[Any], prefix: str = "", width: int = 24) -> list[str]:
    """Return lines that show each option of ``cls`` with its default and its meaning, indented by 2."""
    lines = []
    for option in fields(cls):
        default = "null" if option.default is None else option.default
        shown = default.encode("unicode_escape").decode() if isinstance(default, str) else default
        setting = f"{prefix}{option.name}={shown}"
        meaning = textwrap.wrap(documentation(cls)[option.name], 108 - width)
        lines += [f"  {setting:<{width}}{meaning[0]}", *(" " * (width + 2) + more for more in meaning[1:])]
    return lines
