"""The YAML files that describe sites. A new site needs no Python."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping

from wordrun.errors import ConfigError, nearest
from wordrun.launch import site_check
from wordrun.launch.site import UNKNOWN, Site

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sites")


def find(wanted: str | None, host: str, env: Mapping[str, str]) -> tuple[Site, str]:
    """Return the site (``UNKNOWN`` for a cluster that none describes), and how it was found.

    Args:
        wanted: --site: a name or a file.
        host: this machine's name.
        env: this process's environment.
    """
    files = site_files(env)
    if wanted is not None:
        if wanted in files:
            return load(files[wanted]), f"--site {wanted}"
        if os.path.isfile(wanted):
            return load(wanted), f"--site {wanted}"
        raise ConfigError(
            f"--site {wanted} is neither a file nor one of {', '.join(sorted(files))}{nearest(wanted, files)}; "
            f"put your own into {own_folder(env)}"
        )
    # The user's own files are last in the table, and are searched first.
    for name in reversed(files):
        ours = os.path.dirname(files[name]) == OWN
        site = load(files[name], trusted=ours)
        if site.matches(host, env):
            return site, "recognised" if ours else f"recognised by {files[name]}"
    return UNKNOWN, "not one of the known sites"


def site_files(env: Mapping[str, str]) -> dict[str, str]:
    """Return the site files by name; the user's own override wordrun's."""
    paths = [path for folder in (OWN, own_folder(env)) for path in _yaml(folder)]
    return {os.path.basename(path).removesuffix(".yaml"): path for path in paths}


def own_folder(env: Mapping[str, str]) -> str:
    """Return the folder of the user's own site files."""
    config = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME", os.path.expanduser("~")), ".config")
    return os.path.join(config, "wordrun", "sites")


def load(path: str, *, trusted: bool = False) -> Site:
    """Return the site that a YAML file describes.

    Args:
        path: the file.
        trusted: skip the checks, which take a while; for wordrun's own files a test makes them.

    Raises:
        ConfigError: the file cannot be read, or a key or value of it cannot be used; every mistake is named.
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
        # Not UTF-8, characters that YAML does not have, a date that does not exist.
        raise ConfigError(f"site file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"site file {path} should hold keys and values")
    problems = [] if trusted else site_check.problems(content)
    if problems:
        raise ConfigError("\n".join(f"site file {path}: {problem}" for problem in problems))
    lists = {key: tuple(map(str, value)) for key, value in content.items() if isinstance(value, list)}
    return Site(name=os.path.splitext(os.path.basename(path))[0], **{**content, **lists})


def _yaml(folder: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.yaml")))
