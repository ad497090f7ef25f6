"""Translates errors of Hydra and OmegaConf into messages that name the override, its value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from wordrun.common import suggestions
from wordrun.common.errors import ConfigError, as_whole, first_line, listed
from wordrun.common.suggestions import nearest
from wordrun.config.registry import backends, parts
from wordrun.config.schema import SECTIONS, SEVERAL, parts_in, schemas
from wordrun.config.strings import as_typed

# Exceptions that Hydra and OmegaConf raise for an invalid override.
INVALID_OVERRIDE = (HydraException, OmegaConfBaseException, TypeError, ValueError, YAMLError, RecursionError)
# wordrun's own plugins.
PLUGINS = {"launcher": "wordrun", "sweeper": "wordrun_optuna"}
GROUPS = (*SECTIONS, "experiment", "train.backend")
VALUE = re.compile(r"(?!hydra\.searchpath|train\.backend=)\w+(\.\w+)+=.*", re.DOTALL)
"""An override that changes the value of an option; the others choose files, add or delete."""


def diagnose(
    overrides: list[str], compose: Callable[[list[str]], DictConfig], cause: Exception
) -> tuple[list[str], DictConfig | None, list[str]]:
    """Find out which overrides cannot be applied.

    Args:
        overrides: all overrides.
        compose: composes some overrides to a tree.
        cause: the exception of ``compose`` for all overrides, one of ``INVALID_OVERRIDE``.

    Returns:
        A message for each override that cannot be applied; the tree composed of the others (None: it does not compose);
        and the groups, such as model, whose override was rejected: in the tree, they have their defaults.
    """
    try:
        base = compose([])
    except INVALID_OVERRIDE:
        is_ours = isinstance(cause, ConfigError)
        return [str(cause) if is_ours else f"the configuration tree itself does not compose: {cause}"], None, []
    good: list[str] = []
    # Hydra's search path first, since it adds files.
    left = sorted((o for o in overrides if not VALUE.fullmatch(o)), key=lambda o: not o.startswith("hydra"))
    while True:  # again, because a file may set options of a part that a later override chooses
        rejected: dict[str, Exception] = {}
        for override in left:
            try:
                base = compose([*good, override])
                good.append(override)
            except INVALID_OVERRIDE as error:
                rejected[override] = error
        if len(rejected) == len(left):
            break
        left = [*rejected]
    for override in (o for o in overrides if VALUE.fullmatch(o)):
        try:
            (parsed,) = OverridesParser.create().parse_overrides(as_typed([override], base))
            if parsed.is_sweep_override():
                raise HydraException("Ambiguous value")
            OmegaConf.update(base, parsed.key_or_group, parsed.value())
        except INVALID_OVERRIDE as error:
            rejected[override] = error
    # The options of a part that cannot be imported cannot be checked.
    broken = tuple(f"{name_of(override)}." for override, error in rejected.items() if isinstance(error, ConfigError))
    problems = [
        translate(o, rejected[o], base)
        for o in dict.fromkeys(overrides)
        if o in rejected and not name_of(o).startswith(broken)
    ]
    return problems or [first_line(cause)], base, [name for name in map(name_of, rejected) if name in SECTIONS]


def translate(override: str, error: Exception, base: DictConfig) -> str:
    """Return our message for an ``override`` that Hydra rejects with ``error``."""
    if isinstance(error, ConfigError):  # about a part, which Hydra was loading
        return str(error)
    if isinstance(error, RecursionError):
        return f"{override:.200}: nested too deeply, or its config files name each other in their defaults"
    value = override.partition("=")[2]
    name, text = name_of(override), str(error)
    if isinstance(error, YAMLError):
        return f"{override}: the file is not valid YAML: {' '.join(text.split())}"
    if options := re.search(r"Available options in '[^']*':\n(.*)", text, re.DOTALL):
        known = options[1].partition("Config search path:")[0].split()
        offered = backends() if name == "train.backend" else known
        kind = re.split("[./]", name)[-1]
        return f"{name}={value}: unknown {kind}{nearest(value, offered)}{listed(offered)}"
    if isinstance(error, OverrideParseException) and "=" in override:
        return unparsable(override)
    if "=" not in override:
        return f"'{override}' is not a valid override: write KEY=VALUE; --help lists the options"
    reason = first_line(error.__cause__ or error)
    if inside := re.search(r"In '([^']+)': \w+ raised while composing config:\s*(.*)", f"{text}\n{error.__cause__}"):
        return f"{override}: in {inside[1]}.yaml: {inside[2]}"
    unknown = re.search(r"Could not load '([^/']+)/([^']+)'", text)
    if unknown and unknown[1] in SEVERAL:
        offered = list(parts(unknown[1]))
        kind = unknown[1].removesuffix("s")
        return f"{override}: unknown {kind} '{unknown[2]}'{nearest(unknown[2], offered)}{listed(offered)}"
    if name in SEVERAL and isinstance(error, TypeError):
        return f"{override} should be a list of names: {', '.join(schemas(name))}"
    if name in GROUPS:
        return f"{override}: {reason} (choose one by {name}=NAME)"
    if "Ambiguous value" in text:
        return f"{override}: for a sweep over several values add -m; for a list use brackets, {name}=[{value}]"
    section, _, part = name.rpartition(".")[0].partition(".")
    if section in SEVERAL and part in parts(section) and part not in base[section]:
        return f"{override} has no effect without {section}={part}: add it, as in {section}=[{part}]"
    plugin = re.fullmatch(r"hydra\.(launcher|sweeper)\.(\w+)", name)
    if plugin and plugin[2] not in base.hydra[plugin[1]]:
        choice = base.hydra.runtime.choices[f"hydra/{plugin[1]}"]
        close = nearest(plugin[2], map(str, base.hydra[plugin[1]]), f"hydra.{plugin[1]}.")
        remedy = f": add hydra/{plugin[1]}={PLUGINS[plugin[1]]}" if choice == "basic" else close
        return f"unknown option '{name}' of hydra/{plugin[1]}={choice}{remedy}"
    known = sorted({*option_names(base), *GROUPS})
    if name not in known and name.partition(".")[0] != "hydra":
        return unknown_option(name, known)
    if problem := wrong_type(name, value, error):
        return problem
    if value == "null":
        return f"{name}=null needs a value: omit it for the default"
    return f"{override}: {reason}"


def wrong_type(name: str, value: str, error: Exception) -> str:
    """Return our message for an ``error`` about the type of a ``value``; empty: it is another one."""
    # "Value 'abc' of type 'str' could not be converted to Integer", "Value 'maybe' is not a valid bool"
    wanted = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    if not (match := re.search(r"(?:converted to|not a valid) (\w+)", f"{error} {error.__cause__}")):
        return ""
    written = as_whole(value) if match[1] == "Integer" else ""
    return f"{name}={value}{written}" if written else f"{name}={value} should be {wanted.get(match[1], match[1])}"


def unparsable(override: str) -> str:
    """Return the message for an ``override`` with a value that is not in Hydra's grammar."""
    key, _, value = override.partition("=")
    return f"""{override}: Hydra cannot parse this value; quote it twice: '{key}="{value}"'"""


def unknown_option(name: str, known: Sequence[str]) -> str:
    """Return the message for the option ``name``, which is not one of the ``known`` ones."""
    return f"unknown option '{name}'{nearest_option(name, known)}"


def nearest_option(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean 'x'?" for a similar option in any section; without one, the command that lists options."""
    section, _, last = name.rpartition(".")
    inside = [each.rpartition(".")[2] for each in known if section and each.rpartition(".")[0] == section]
    elsewhere = [each for each in known if not inside or each.rpartition(".")[2] == last]
    meant = suggestions.option(name, known) or nearest(name, elsewhere) or nearest(last, inside, f"{section}.")
    return meant or suggestions.where_listed(name, known)


def option_names(composed: DictConfig) -> Iterator[str]:
    """Yield the names of all options in the selected config groups."""
    for prefix, node in parts_in(composed).items():
        yield from (f"{prefix}.{f.name}" for f in fields(OmegaConf.get_type(node)))  # type: ignore[arg-type]


def name_of(override: str) -> str:
    """Return the key that an override changes."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]
