"""Checks before anything is prepared that parts from outside wordrun can be called as wordrun calls them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from wordrun.common.errors import ConfigError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.config.registry import Part
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.model.base import Model
from wordrun.track.base import Tracker
from wordrun.train.hints import relative
from wordrun.train.hooks.base import Hook
from wordrun.train.metrics import MetricOfSums
from wordrun.train.profile import Profiler

CALLS: dict[str, tuple[str, ...]] = {
    "optimizer": ("cfg", "parameters"),
    "schedule": ("cfg", "step", "steps", "highest", "lowest"),
    "metrics": ("options", "outputs", "batch"),
    "hooks": ("options",),
    "tracker": ("options", "run", "state"),
    "profiler": ("options", "folder", "rank"),
    "backend": ("spec",),
}
"""The arguments with which wordrun calls a part of each kind; for kinds not listed, they depend on the data."""
BASES: dict[str, type[Any]] = {
    "hooks": Hook,
    "metrics": MetricOfSums,
    "tracker": Tracker,
    "profiler": Profiler,
    "tokenizer": Tokenizer,
}
"""The classes from which parts derive."""
MODEL = ("metrics", "tensor_parallel_plan")
"""Optional methods of a plain nn.Module. Its method ``losses`` is checked when the model is built."""
CLOSE = 0.8
"""Similarity (difflib's ratio) from which a name is probably a misspelling of another one."""


def check(part: Part) -> None:
    """Check the code of ``part``.

    Raises:
        ConfigError: wordrun could not call it; the message has the file and line of each definition.
    """
    code, call = part.load(), CALLS.get(part.kind)
    if part.kind == "metrics" and isinstance(code, type):
        call = ("options",)
    problems = list(_call_problems(code, code, call)) if call else []
    if isinstance(code, type):
        problems += class_problems(code, BASES.get(part.kind))
    if problems:
        raise ConfigError("\n".join(f"{part}: {problem}" for problem in problems), page=_page(part))


def class_problems(cls: type[Any], base: type[Any] | None = None) -> Iterator[str]:
    """Yield what is wrong with the methods of ``cls`` that wordrun calls, and with its base class."""
    if base is not None and not issubclass(cls, base):
        yield f"{cls.__name__} ({_place(cls)}) should derive from {base.__module__}.{base.__name__}"
        return
    interface = [each for each in cls.__mro__ if _is_ours(each)]
    methods = {name for each in interface for name, value in vars(each).items() if inspect.isfunction(value)}
    if issubclass(cls, nn.Module) and Model not in interface:
        interface, methods = [Model], {*MODEL}
    seen = set[str]()
    for owner in cls.__mro__:
        for name, own in vars(owner).items():
            if name[0] == "_" or name in seen or _is_ours(owner):
                continue
            seen.add(name)
            if wanted := next((vars(each)[name] for each in interface if name in vars(each)), None):
                yield from _method_problems(f"{cls.__name__}.{name}", own, wanted)
            elif (
                base is not None
                and inspect.isfunction(own)
                and (close := difflib.get_close_matches(name, methods, 1, CLOSE))
            ):
                LOGGER.warning(
                    "wordrun does not call %s.%s (%s): did you mean %s?",
                    cls.__name__,
                    name,
                    _place(own),
                    close[0],
                    extra=FIRST_RANK,
                )


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] == "wordrun"


def _method_problems(name: str, own: Any, wanted: Any) -> Iterator[str]:
    """Yield why the attribute ``own`` of a class cannot be called like ``wanted``, the method of its base class."""
    wanted = getattr(wanted, "__func__", wanted)  # of a classmethod or a staticmethod
    if not inspect.isfunction(wanted):
        return
    function = getattr(own, "__func__", own)
    if not callable(function):
        yield f"{name} should be a method {_shown(_names(wanted))}, not {type(own).__name__}"
        return
    names = _names(wanted)
    yield from _call_problems(function, own, names[1:] if isinstance(own, staticmethod) else names, name)


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the required arguments of ``function``; those with a = at the end are passed by keyword."""
    found = inspect.signature(function).parameters.values()
    needed = [each for each in found if each.default is each.empty]
    return tuple(
        f"{each.name}=" if each.kind is each.KEYWORD_ONLY else each.name
        for each in needed
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    )


def _call_problems(code: Any, defined: Any, names: Iterable[str], name: str = "") -> Iterator[str]:
    """Yield why ``code`` cannot be called with arguments of these ``names``."""
    positional = [each for each in names if not each.endswith("=")]
    keywords = dict.fromkeys(each[:-1] for each in names if each.endswith("="))
    try:
        signature = inspect.signature(code)
    except (TypeError, ValueError):  # it is not written in Python
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        name = name or getattr(code, "__name__", str(code))
        yield f"{name}{_plain(signature)} ({_place(defined)}) should take {_shown(names)}: {error}"


def _shown(names: Iterable[str]) -> str:
    positional = [each for each in names if not each.endswith("=")]
    keywords = [each[:-1] for each in names if each.endswith("=")]
    return f"({', '.join([*positional, *(['*'] if keywords else []), *keywords])})"


def _plain(signature: inspect.Signature) -> str:
    """Return a signature without types."""
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _place(defined: Any) -> str:
    """Return the file and line of a definition."""
    found = inspect.unwrap(getattr(defined, "__func__", defined))
    try:
        file, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
    except (OSError, TypeError):  # a notebook
        return "source unknown"
    return f"{relative(Path(str(file)))}:{line}"


def _page(part: Part) -> str:
    kind = part.kind.removesuffix("s")
    section = {"optimizer": "an-optimizer", "data": "data"}.get(kind, f"a-{kind}")
    return f"extend/{kind}.md#{section}"
