"""Checks shared by the config sections; each returns error messages."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wordrun.common.suggestions import nearest


def positive(section: str, node: Any, *names: str) -> list[str]:
    """Return a message for each option in ``names`` of ``node`` that is below 1; None is valid."""
    return _unless(lambda value: value >= 1, section, node, names, "should be at least 1")


def not_negative(section: str, node: Any, *names: str) -> list[str]:
    """Return a message for each option in ``names`` of ``node`` that is below 0; None is valid."""
    return _unless(lambda value: value >= 0, section, node, names, "should not be negative")


def above_zero(section: str, node: Any, *names: str) -> list[str]:
    """Return a message for each option in ``names`` of ``node`` that is not a finite number above 0."""
    return _unless(lambda value: 0 < value < math.inf, section, node, names, "should be a number above 0")


def fractions(section: str, node: Any, *names: str) -> list[str]:
    """Return a message for each option in ``names`` of ``node`` that is outside [0, 1)."""
    return _unless(lambda value: 0 <= value < 1, section, node, names, "should be at least 0 and less than 1")


def one_of(key: str, value: str, known: Iterable[str]) -> list[str]:
    """Return a message if ``value`` of the option ``key`` is not in ``known``."""
    known = list(known)
    return [] if value in known else [f"{key}={value} should be one of {', '.join(known)}{nearest(value, known)}"]


def part_of_path(key: str, value: str) -> list[str]:
    """Return a message if ``value`` of the option ``key`` cannot be a folder in the run directory's path."""
    if value.strip() not in ("", ".", "..") and not value.startswith("-") and value.isprintable() and "/" not in value:
        return []
    rule = "it should not be empty, begin with - or contain / or control characters"
    return [f"{key}={value!r} is part of the run directory's path: {rule}; hydra.run.dir=DIR sets the whole path"]


LARGEST = 2**63 - 1
"""torch's whole numbers have 64 bits."""


def too_large(key: str, value: int) -> str:
    """Return a message if no library can take ``value``, that of the option ``key``; empty: they can."""
    return f"{key}={value!s:.60}: the largest value is {LARGEST}" if abs(value) > LARGEST else ""


UP = re.compile(r"(^|_)(accuracy|top\d+|precision|recall|f1|auc|bleu|rouge|score)($|_)")
DOWN = re.compile(r"(^|_)(loss|perplexity|error|bits|bpb)($|_)")


def higher_is_better(metric: str, mode: str) -> bool | None:
    """Return whether higher values of ``metric`` are better: what ``mode`` (min, max, auto) says, or else its name.

    None: the name does not say.
    """
    if mode != "auto":
        return mode == "max"
    return True if UP.search(metric) else False if DOWN.search(metric) else None


def metric_of(section: str, metric: str, mode: str, option: str) -> Iterator[str]:
    """Yield what is wrong with ``metric``, the value of the option ``section``, and ``mode``, that of ``option``."""
    if wrong := one_of(option, mode, ("auto", "min", "max")):
        yield from wrong
    elif not metric.startswith("val_"):
        yield f"{section}={metric}: evaluations report metrics as val_NAME; did you mean 'val_{metric}'?"
    elif higher_is_better(metric, mode) is None:
        yield f"{option}=auto: {metric} is not known to be better when higher or lower: use {option}=max, or min"


def _unless(is_valid: Callable[[Any], bool], section: str, node: Any, names: tuple[str, ...], what: str) -> list[str]:
    values = [(name, getattr(node, name)) for name in names]
    prefix = f"{section}." if section else ""
    return [f"{prefix}{name}={value} {what}" for name, value in values if value is not None and not is_valid(value)]
