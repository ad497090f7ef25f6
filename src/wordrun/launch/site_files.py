"""Read and check the YAML files that describe sites. A new site needs no Python."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import nearest
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import UNKNOWN, Site

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sites")
# Returns what is wrong with a value, or an empty string.
Kind = Callable[[Any], str]
# A dict's keys are arbitrary (ANY), names of variables (VARIABLE), or those listed.
ANY, VARIABLE = "any name", "a variable"


def find(wanted: str | None, host: str, env: Mapping[str, str]) -> tuple[Site, str]:
    """Return the site (``UNKNOWN`` if no file describes this cluster), and how it was found.

    Args:
        wanted: --site: a name or a file.
        host: this machine's name.
        env: this process's environment.
    """
    files = site_files(env)
    if wanted is not None:
        if wanted in files or os.path.isfile(wanted):
            return load(files.get(wanted, wanted)), f"--site {wanted}"
        known = f"{', '.join(sorted(files))}{nearest(wanted, files)}; put your own into {own_folder(env)}"
        raise ConfigError(f"--site {wanted} is neither a file nor one of {known}", page="site_files.md#site-files")
    # The user's own files come last in the table but are searched first.
    for name in reversed(files):
        ours = os.path.dirname(files[name]) == OWN
        site = load(files[name], trusted=ours)
        if site.matches(host, env):
            return site, "recognized" if ours else f"recognized by {files[name]}"
    return UNKNOWN, "not one of the known sites"


def site_files(env: Mapping[str, str]) -> dict[str, str]:
    """Return the site files by name; the user's own override wordrun's."""
    patterns = (os.path.join(glob.escape(folder), "*.yaml") for folder in (OWN, own_folder(env)))
    paths = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    return {os.path.basename(path).removesuffix(".yaml"): path for path in paths}


def own_file(wanted: str, env: Mapping[str, str]) -> str:
    """Return the absolute path of the user's file for a site, given by name or path; empty: the file is wordrun's."""
    path = site_files(env).get(wanted, wanted)
    return os.path.abspath(path) if wanted and os.path.dirname(path) != OWN else ""


def own_folder(env: Mapping[str, str]) -> str:
    """Return the folder of the user's own site files."""
    config = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME", os.path.expanduser("~")), ".config")
    return os.path.join(config, "wordrun", "sites")


def load(path: str, *, trusted: bool = False) -> Site:
    """Return the site that a YAML file describes.

    Args:
        path: the file.
        trusted: skip the checks, which take a while; a test runs them on wordrun's own files.

    Raises:
        ConfigError: the file cannot be read, or has invalid keys or values; the message lists them all.
    """
    import yaml

    try:
        with open(path) as file:
            content = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"site file {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark, begin = error.problem_mark or error.context_mark, error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        since = f", in the block from line {begin.line + 1}" if begin and mark and begin.line < mark.line else ""
        why = f"{error.problem or error.context}{since}"
        raise ConfigError(f"site file {path}{where}: {why} (text with any of : # [ {{ needs quotes)") from None
    except (ValueError, yaml.YAMLError) as error:
        # Not UTF-8, characters that YAML forbids, or an invalid date.
        raise ConfigError(f"site file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"site file {path} should contain keys and values")
    problems = [] if trusted else mistakes(content)
    if problems:
        raise ConfigError(
            "\n".join(f"site file {path}: {problem}" for problem in problems), page="site_files.md#site-files"
        )
    lists = {key: tuple(map(str, value)) for key, value in content.items() if isinstance(value, list)}
    return Site(name=os.path.splitext(os.path.basename(path))[0], **{**content, **lists})


def _should(words: str, holds: Callable[[Any], bool]) -> Kind:
    return lambda value: "" if holds(value) else f"should be {words}"


def _text(words: str, pattern: str = ".*") -> Kind:
    return _should(words, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value, re.DOTALL)))


def _one_of(*names: str) -> Kind:
    return lambda value: "" if value in names else f"should be one of {', '.join(names)}{nearest(str(value), names)}"


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_range(value: Any) -> bool:
    whole = isinstance(value, list) and len(value) == 2 and all(_whole(number, 1) for number in value)
    return whole and value[0] <= value[1]


def _is_hours(value: Any) -> bool:
    return _whole(value, 1) or (isinstance(value, float) and value > 0)


def _is_limit(value: Any) -> bool:
    table = value if isinstance(value, dict) and value else {1: value}
    return all(_whole(most, 1) and _is_hours(hours) for most, hours in table.items())


def _pattern(value: Any) -> str:
    if not isinstance(value, str):
        return f"should be {QUOTED}"
    try:
        re.compile(value)
    except re.error as error:
        return f"is not a regular expression: {error}"
    return ""


def _cores(value: Any) -> str:
    text = str(value)
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return "should be cores such as 8-15"
    ranges = [part.split("-") for part in text.split(",")]
    return "" if all(int(part[0]) <= int(part[-1]) for part in ranges) else "should name the lower core first: 8-15"


def _unfilled(text: str, known: Sequence[str], *, slips_only: bool = False) -> str:
    """Return an error for braces that are not placeholders; with ``slips_only``, only if they resemble one."""
    names = [f"{{{word}}}" for word in known]
    for found in re.findall(r"(?<!\$){\w+}" if slips_only else r"{[^{}]*}?|}", text):
        hint = "" if found in names else nearest(found, names)
        if hint or (found not in names and not slips_only):
            return f"has {found}, which is not a placeholder{hint or f'; use {names[0]}'}"
    return ""


def _with_devices(kind: Kind) -> Kind:
    return lambda value: kind(value) or _unfilled(str(value), ["devices"])


def _address(value: Any) -> str:
    complaint = TEXT(value) or _unfilled(value, ["host"])
    return complaint or ("" if "{host}" in value else "should contain {host}, a node's short name")


def _reasoned(value: Any) -> str:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)):
        return "should be [value, reason], both of them text (numbers in quotes)"
    # A value may contain other braces, such as JSON.
    return _unfilled(value[0], ["devices", "devices_reversed"], slips_only=True)


QUOTED = "text (in quotes, where it looks like a number)"
TEXT = _text(QUOTED)
FLAG = _should("true or false", lambda value: isinstance(value, bool))
FROM_1 = _should("a whole number, at least 1", lambda value: _whole(value, 1))
# What each key may hold; a list means a list of that kind.
SHAPES: dict[str, Any] = {
    "description": TEXT,
    "recognise": {"hosts": _pattern, "env": {VARIABLE: _pattern}},
    "scheduler": _one_of(*(name for name, each in SCHEDULERS.items() if each.variable)),
    "launcher": _one_of(*(name for name, each in LAUNCHERS.items() if each.in_sites)),
    "launcher_paths": [TEXT],
    "devices": _should("a whole number, at least 0", lambda value: _whole(value, 0)),
    "device": TEXT,
    "count_devices": FLAG,
    "network": _should("a number of GB/s above 0", _is_hours),
    "ranks_per_node": FROM_1,
    "cores": FROM_1,
    "cores_near_device": [_cores],
    "pals_binding": TEXT,
    "srun_args": [_with_devices(_should("text", lambda value: isinstance(value, str) or _whole(value, 0)))],
    "master_addr": _address,
    "env": {VARIABLE: _reasoned},
    "unset": {VARIABLE: TEXT},
    "proxies": {VARIABLE: TEXT},
    "internet": FLAG,
    "modules": [_text("one line of text, in quotes where it holds ': '", r"[^\n]+")],
    "submit": {
        "filesystems": TEXT,
        "select": TEXT,
        "account_needed": FLAG,
        "queue_needed": FLAG,
        "queue_option": _text("an option of sbatch, such as --partition", r"--[a-z-]+"),
        "directives": [_with_devices(_text("an option with its value, such as -l place=scatter", r"-[^\n]+"))],
    },
    "queues": {
        ANY: {
            "nodes": _should("[least, most] nodes, such as [1, 2]", _is_range),
            "hours": _should("a number above 0, or {most nodes: hours, ...}", _is_limit),
            "jobs": FROM_1,
            "rerunnable": FLAG,
            "device_per_rank": FLAG,
        }
    },
    "default_queue": TEXT,
    "all_queues": FLAG,
}


def mistakes(content: Mapping[str, Any]) -> list[str]:
    """Return the errors in a site file's content."""
    missing = [] if "scheduler" in content else [f"scheduler is missing: it {SHAPES['scheduler'](None)}"]
    return [*missing, *_mismatches("", content, SHAPES)] or _contradictions(content)


def _mismatches(key: str, value: Any, shape: Any) -> list[str]:
    if callable(shape):
        complaint = shape(value)
        return [f"{key}: {value!r} {complaint}"] if complaint else []
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{key}: {value!r} should be a list, such as [{value}]"]
        return [problem for item in value for problem in _mismatches(key, item, shape[0])]
    if not isinstance(value, dict):
        return [f"{key}: {value!r} should be keys and values ({{}} for none)"]
    free = next((word for word in (ANY, VARIABLE) if word in shape), None)
    problems, at = [], f"{key}." if key else ""
    for name, inner in value.items():
        if free is None and name not in shape:
            known = f"; the keys are {', '.join(shape)}" if key else ""
            problems.append(f"{key and key + ': '}unknown key '{name}'{nearest(str(name), shape)}{known}")
        elif free is not None and not isinstance(name, str):
            problems.append(f"{key}: the name {name!r} should be {QUOTED}")
        elif free == VARIABLE and not re.fullmatch(r"[A-Za-z_]\w*", name):
            problems.append(f"{key}: {name!r} should be the name of a variable")
        else:
            problems += _mismatches(f"{at}{name}", inner, shape[free or name])
    return problems


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Return contradictions between values that are individually valid."""
    scheduler, launcher, problems = values["scheduler"], values.get("launcher", ""), []
    for name, each in LAUNCHERS.items():
        for key in each.site_keys:
            if values.get(key) and launcher != name:
                says = f"launcher: {launcher}" if launcher else "no launcher"
                problems.append(f"{key} requires launcher: {name}, and the file says {says}")
    needed = LAUNCHERS[launcher].scheduler if launcher else ""
    if needed not in ("", scheduler):
        problems.append(f"launcher: {launcher} needs scheduler: {needed}, and the file says scheduler: {scheduler}")
    near, devices = values.get("cores_near_device"), values.get("devices")
    if near and devices is not None and len(near) != devices:
        problems.append(f"cores_near_device: {len(near)} entries for devices: {devices}; each device needs its own")
    default, queues = values.get("default_queue"), values.get("queues", {})
    if default and queues and default not in queues:
        problems.append(f"default_queue: {default} is not one of queues{nearest(default, queues)}")
    if not SCHEDULERS[scheduler].fills_directives:
        for text in values.get("submit", {}).get("directives", ()):
            if "{" in text:
                problems.append(f"submit.directives: {text!r}: {scheduler} has no placeholders; write the value itself")
    return problems
