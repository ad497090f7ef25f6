"""The parts that a config can choose, by kind and name: wordrun's own, installed packages' and the project's.

All of them call ``register``: wordrun's own in ``config/parts.py``, others in modules that ``config/project.py`` finds.
A part is named by strings and imported when it is chosen, so listing the parts imports none of them.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import importlib.resources
import inspect
import pathlib
import re
import sys
import traceback
import typing
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError, PartError, UserError, first_line
from wordrun.common.suggestions import nearest
from wordrun.config import project

KINDS: Mapping[str, str] = {
    "model": "ModelConfig",
    "tokenizer": "TokenizerConfig",
    "data": "DataConfig",
    "backend": "BackendConfig",
    "optimizer": "OptimizerConfig",
    "schedule": "ScheduleConfig",
    "tracker": "TrackerConfig",
    "profiler": "ProfilerConfig",
    "hooks": "HookConfig",
    "metrics": "MetricConfig",
}
"""Each kind of part, which is also a config group, and the base class of its options in ``wordrun.config``."""

WORDS = ("null", "true", "false", "nan", "inf", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Part:
    """One part: its options, and the class or function that they configure."""

    declared: type[Any] | str
    """A dataclass with the default, type and documentation of every option, or ``package.module:Name`` of one."""
    implementation: Any
    """``package.module:Name`` of a class or function, or the class or function itself."""
    kind: str = ""
    """A key of ``KINDS``."""
    name: str = ""
    """As in GROUP=NAME."""
    origin: str = ""
    """The module that it comes from; empty: wordrun itself."""

    def load(self) -> Any:
        """Return the class or function that the options configure, importing its module.

        Raises:
            ConfigError: it cannot be imported.
        """
        return self._import(self.implementation)

    def build(self, *arguments: Any) -> Any:
        """Return the result of calling the class or function that the options configure.

        Raises:
            PartError: it is not wordrun's own, and failed.
        """
        make = self.load()
        with self.blamed():
            return make(*arguments)

    @contextlib.contextmanager
    def blamed(self, hint: str = "") -> Iterator[None]:
        """Name this part, unless it is wordrun's own, in an exception that its code raises within the ``with`` block.

        Args:
            hint: added to the message.

        Raises:
            PartError: an exception that is not a UserError was raised.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError) or not self.origin:
                raise
            raise self.failed(error, hint) from error

    def failed(self, error: Exception, hint: str = "") -> PartError:
        """Return an exception that says that this part failed with ``error``; ``hint`` says where."""
        name = getattr(self.load(), "__name__", str(self.implementation))
        return PartError(f"{self}: {name} failed{hint}", error, self.load())

    @cached_property
    def options(self) -> type[Any]:
        """The dataclass of the options, whose module is imported on first access.

        Raises:
            ConfigError: it cannot be imported, or lacks types or documentation.
        """
        cls: type[Any] = self._import(self.declared)
        if self.origin and (problems := problems_of(cls, KINDS[self.kind])):
            raise ConfigError("\n".join(f"{self}: {problem}" for problem in problems))
        return cls

    def configures(self, options: Any) -> bool:
        """Return whether ``options`` are an instance of this part's dataclass, without importing anything."""
        cls: Any = self.declared
        if isinstance(cls, str):
            module, _, name = cls.partition(":")
            cls = getattr(sys.modules.get(module), name, None)
        return type(options) is cls

    def _import(self, what: Any) -> Any:
        if not isinstance(what, str):
            return what
        module, _, name = what.partition(":")
        found = import_named(module, str(self))
        if not hasattr(found, name):
            near = nearest(name, [each for each in vars(found) if not each.startswith("_")])
            raise ConfigError(f"{self}: {module} ({found.__file__}) has no {name}{near}")
        return getattr(found, name)

    def __str__(self) -> str:
        return f"{self.kind}={self.name} ({self.origin or 'part of wordrun'})"


_parts: dict[str, dict[str, Part]] = {kind: {} for kind in KINDS}
_registered: set[str] = set()
"""The modules whose parts are registered."""
_mistakes: ContextVar[list[str] | None] = ContextVar("mistakes", default=None)
"""Problems of the parts of the module that ``_import_parts`` is importing; None: no module is being imported."""


def register(kind: str, name: str, options: type[Any] | str, implementation: Any) -> None:
    """Make a part available as ``kind=name``.

    Args:
        kind: a config group, such as model.
        name: in lower case; backends can also be chosen in the spelling given here.
        options: a dataclass derived from the kind's in ``wordrun.config``, or ``package.module:Name`` of one, which is
            imported when the part is chosen.
        implementation: ``package.module:Name`` of the class or function that the options configure, or the class or
            function itself.

    Raises:
        ConfigError: there is no such kind, or another part has this name.
    """
    modules = [_spelled(what).partition(":")[0] for what in (options, implementation)]
    origin = next((module for module in modules if module.partition(".")[0] != "wordrun"), "")
    part = Part(options, implementation, kind, name, origin)
    problem = _problem_with(part)
    if not problem:
        _parts[kind][name.lower()] = part
    elif (mistakes := _mistakes.get()) is None:
        raise ConfigError(problem)
    else:
        mistakes.append(problem)


def _problem_with(part: Part) -> str:
    """Return why ``part`` cannot be registered; empty: it can."""
    kind, name = part.kind, part.name
    if kind not in KINDS:
        return f"{part}: unknown kind of part{nearest(kind, KINDS)} ({', '.join(KINDS)})"
    pattern = r"\w+" if kind == "backend" else r"[a-z][a-z0-9_]*"
    if not re.fullmatch(pattern, name) or name.lower() in WORDS:
        return (
            f"{part}: use lower-case letters, digits and underscores as a name, beginning with a letter, and no word "
            f"that YAML or Hydra reads as a value ({', '.join(WORDS)})"
        )
    for what in (part.declared, part.implementation):
        if isinstance(what, str) and not re.fullmatch(r"\w+(\.\w+)*:\w+", what):
            return f"{part}: {what!r} should be 'package.module:Name'"
    taken = _parts[kind].get(name.lower())
    if taken and (_spelled(taken.declared), _spelled(taken.implementation)) != (
        _spelled(part.declared),
        _spelled(part.implementation),
    ):
        return f"{part}: the name is taken by {taken}; choose another"
    if (
        part.origin
        and not taken
        and importlib.resources.files("wordrun.conf").joinpath(kind, f"{name.lower()}.yaml").is_file()
    ):
        return f"{part}: the name is taken by a preset of wordrun's; choose another"
    return ""


def _spelled(what: Any) -> str:
    """Return ``what`` as ``module:Name``, which stays the same if a notebook's cell defines the class again."""
    return what if isinstance(what, str) else f"{what.__module__}:{getattr(what, '__qualname__', what)}"


def parts(kind: str) -> dict[str, Part]:
    """Return all parts of a kind by name in lower case, in the order in which they were registered.

    Raises:
        ConfigError: a module that registers parts cannot be imported.
    """
    for module, whose in (("wordrun.config.parts", "wordrun"), *project.modules()):
        if module not in _registered:
            _registered.add(module)  # now, because it may itself look up parts
            try:
                _import_parts(module, whose)
            except ConfigError:
                _registered.discard(module)
                raise
    return _parts[kind]


def _import_parts(module: str, whose: str) -> None:
    """Import a ``module`` that registers parts.

    Raises:
        ConfigError: it cannot be imported, or registers parts with mistakes; the message names all of them.
    """
    mistakes = list[str]()
    outside = _mistakes.set(mistakes)
    try:
        import_named(module, whose)
    finally:
        _mistakes.reset(outside)
    if mistakes:
        file = sys.modules.pop(module).__file__  # so that the next import registers the parts again
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in mistakes))


def backends() -> list[str]:
    """Return the names that train.backend takes."""
    return [part.name for part in parts("backend").values()]


def packages() -> set[str]:
    """Return the names of the top-level packages that have parts or their options."""
    named = [part.declared for kind in KINDS for part in parts(kind).values()]
    return {what.partition(":")[0].partition(".")[0] for what in named if isinstance(what, str)}


def part_of(kind: str, options: Any) -> Part:
    """Return the part that ``options`` configure.

    Raises:
        ConfigError: none has options of this type.
    """
    found = {name: part for name, part in parts(kind).items() if part.configures(options)}
    if not found:
        raise ConfigError(
            f"no {kind} has the options {type(options).__name__}: register it, as in wordrun.register('{kind}', NAME, "
            f"{type(options).__name__}, IMPLEMENTATION)",
            page="extend.md#where-parts-are-found",
        )
    # Several parts may have the same options; a model's name is that of its preset.
    name = str(getattr(options, "kind" if kind == "data" else "name", "")).lower()
    return found.get(name) or next(iter(found.values()))


def check_has_huggingface_format(options: Any) -> None:
    """Raise a ConfigError if ``options`` are of a model from outside wordrun that has no Hugging Face format."""
    part = part_of("model", options)
    if part.origin and not getattr(part.load(), "has_huggingface_format", False):
        raise ConfigError(
            f"{part} has no Hugging Face format, as only wordrun's own models do: wordrun export form=checkpoint "
            "writes its weights, and train.init_from=FOLDER reads them"
        )


def import_named(module: str, whose: str) -> Any:
    """Return the imported ``module``.

    Raises:
        ConfigError: it cannot be imported; the message says on which line, and that ``whose`` part needs it.
    """
    try:
        return importlib.import_module(module)
    except ConfigError:  # names its part
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if frame.filename[:1] != "<"]
        if frames[:1] and "importlib" in frames[0].filename:
            frames = frames[1:]
        where = ""
        if frames:  # the last line in the part's own files, not in a library that they call
            folder = Path(frames[0].filename).parent
            last = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(folder))
            where = f" ({last.filename}, line {last.lineno})"
        elif isinstance(error, SyntaxError):
            where = f" ({error.filename}, line {error.lineno})"
        what = f"{type(error).__name__}: {first_line(error.msg if isinstance(error, SyntaxError) else error)}"
        raise ConfigError(f"{whose}: cannot import {module}: {what}{where}") from error


def problems_of(cls: Any, base: str) -> list[str]:
    """Return what is wrong with a dataclass of options, which should derive from ``base`` in ``wordrun.config``."""
    name = getattr(cls, "__name__", repr(cls))
    if not (isinstance(cls, type) and "__dataclass_fields__" in vars(cls)):
        return [f"{name} is not a dataclass: write @dataclass above it"]
    if not issubclass(cls, getattr(importlib.import_module("wordrun.config"), base)):
        return [f"{name} does not derive from wordrun.config.{base}: write class {name}({base})"]
    found = []
    own: list[Any] = [each for each in cls.__mro__ if is_dataclass(each) and each.__module__[:8] != "wordrun."]
    for each in own:
        docs, typed = field_docs(each), inspect.get_annotations(each)
        # An attribute may replace a base class's property, such as built_from of a tokenizer, which is no option.
        replaced = {key for base in each.__mro__[1:] for key in vars(base) if isinstance(vars(base)[key], property)}
        plain = [key for key, value in vars(each).items() if not (callable(value) or hasattr(value, "__get__"))]
        untyped = [key for key in plain if key[0] != "_" and key not in {*typed, *replaced}]
        found += [f"{each.__name__}.{key} has no type: write {key}: TYPE = ..." for key in untyped]
        found += [f"{each.__name__}.{key} {problem}" for key, problem in _type_problems(each, typed).items()]
        found += [
            f'{each.__name__}.{key} has no documentation: write a """line""" under it'
            for key in typed
            if docs is not None and key in {field.name for field in fields(each)} - {"name", *docs}
        ]
    return found


def field_docs(cls: type[Any]) -> dict[str, str] | None:
    """Return the documentation of the fields in the body of a config dataclass: the string literal under each.

    None: Python does not know the source, as in a notebook.
    """
    try:
        lines, _ = inspect.findsource(sys.modules[cls.__module__])
        return _field_docs("".join(lines)).get(cls.__name__)
    except (OSError, TypeError, KeyError, SyntaxError):
        return None


@cache
def _field_docs(source: str) -> dict[str, dict[str, str]]:
    """Return the strings under fields by the names of the classes in a module's source and of the fields."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            docs = found.setdefault(node.name, {})  # if several classes have this name, the fields of all
            for field, text in pairwise(node.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(doc))) if doc:
                        docs[name] = inspect.cleandoc(doc)
    return found


def documentation(cls: type[Any]) -> dict[str, str]:
    """Return the documentation of each field of a config dataclass, those of its bases included; empty: it has none."""
    found = {name: text for base in reversed(cls.__mro__[:-1]) for name, text in (field_docs(base) or {}).items()}
    return dict.fromkeys((field.name for field in fields(cls)), "") | found


CHOICE = "write str, and check the value in problems()"


def _type_problems(cls: type[Any], names: typing.Iterable[str]) -> dict[str, str]:
    """Return why options of the dataclass ``cls`` cannot have their types, and what to write, by their names."""
    try:
        hints = typing.get_type_hints(cls)
    except Exception:  # a name that only a type checker knows
        return {}
    return {name: problem for name in names if name in hints and (problem := _problem(hints[name]))}


def _problem(kind: Any) -> str:
    """Return what is wrong with a type, or with a type in it; empty: nothing."""
    if typing.get_origin(kind) is typing.Literal:
        return f"has the type {str(kind).removeprefix('typing.')}, which options cannot have: {CHOICE}"
    if isinstance(kind, type):
        for base, remedy in (
            (enum.Enum, CHOICE),
            (pathlib.PurePath, "write str, and call Path where it is used"),
            (bytes, "write str"),
        ):
            if issubclass(kind, base):
                return f"has the type {kind.__name__}, which a checkpoint cannot hold: {remedy}"
    return next((found for each in typing.get_args(kind) if (found := _problem(each))), "")
