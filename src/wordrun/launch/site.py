"""Sites: what is known of a cluster, as data. A new one is a YAML file; no Python."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from wordrun.errors import ConfigError, nearest

KINDS = {int: "a whole number", list: "a list", dict: "names and values", str: "text", bool: "true or false"}
# The words in braces that are filled in where a site's texts are used. Other braces stay, as JSON's in a variable.
PLACEHOLDERS = {
    "srun_args": ("devices",),
    "master_addr": ("host",),
    "env": ("devices", "devices_reversed"),
    "submit.directives": ("devices",),
}
OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sites")


@dataclass(frozen=True)
class Site:
    """One cluster. The fields are the keys of its YAML file."""

    name: str = "unknown"
    """The file's name without .yaml."""
    description: str = ""
    """One line for people."""
    recognise: Mapping[str, Any] = field(default_factory=dict)
    """hosts: a regular expression for a node's whole short name; env: variables, and what is found in their values."""
    scheduler: str = ""
    """pbs or slurm."""
    launcher: str = ""
    """What starts ranks in its jobs: pals, srun, openmpi or hydra."""
    launcher_paths: tuple[str, ...] = ()
    """Where that launcher lies (wildcards allowed), in order of preference; nothing: in PATH."""
    devices: int | None = None
    """Accelerators of a node; nothing: those that the job shows."""
    device: str = ""
    """What they are, as plan.device names it."""
    count_devices: bool = False
    """Jobs may hold a part of a node's devices: believe what is visible rather than ``devices``."""
    ranks_per_node: int | None = None
    """Nothing: one per device, else one."""
    cores: int | None = None
    """Hardware threads of a node that ranks may use, where the job does not say."""
    cores_near_device: tuple[str, ...] = ()
    """For each device the cores next to it, such as 8-15: what PALS binds its rank to."""
    pals_binding: str = ""
    """PALS's --cpu-bind where there are no devices, such as depth."""
    srun_args: tuple[str, ...] = ()
    """Options of srun for devices and binding; {devices} stands for their number per node."""
    master_addr: str = "{host}"
    """Name under which other nodes reach {host}, a node's short name."""
    env: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Variables for every rank: value and reason. What the user exported wins."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Variables that must not reach the launcher, and the reason."""
    proxies: Mapping[str, str] = field(default_factory=dict)
    """Variables through which compute nodes reach the internet."""
    internet: bool = True
    """Whether compute nodes reach the internet at all; if not, W&B records offline."""
    modules: tuple[str, ...] = ()
    """Shell lines that bring torch and MPI, for setup_python."""
    submit: Mapping[str, Any] = field(default_factory=dict)
    """For job scripts: filesystems, select (empty: whole nodes, of which nothing need be asked), account_needed,
    queue_needed, queue_option, directives."""
    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name to nodes [least, most], hours (or most nodes to hours, from the fewest on), rerunnable, and device_per_rank
    where a job asks for devices one by one."""

    @property
    def way_out(self) -> str:
        """How compute nodes reach the internet, in words."""
        if not self.internet:
            return f"compute nodes of {self.name} do not reach it"
        proxies = [name for name in self.proxies if name != "no_proxy"]
        return f"by the site's proxies ({', '.join(proxies)})" if proxies else "reached directly"

    def matches(self, host: str, env: Mapping[str, str]) -> bool:
        """Say whether ``host`` or a variable of ``env`` tells that this is the site."""
        short = host.partition(".")[0]
        hosts = self.recognise.get("hosts")
        if hosts and (re.fullmatch(hosts, host) or re.fullmatch(hosts, short)):
            return True
        patterns = self.recognise.get("env", {})
        return any(name in env and re.search(pattern, env[name]) for name, pattern in patterns.items())

    def cpu_binding(self, ppn: int) -> str:
        """Return what PALS's --cpu-bind takes for ``ppn`` ranks on a node; rank r drives device r mod devices.

        Ranks that share a device share its cores evenly; a rank has the cores of its own device alone.
        """
        near = self.cores_near_device
        if not near:
            return self.pals_binding
        sharing = -(-ppn // len(near))
        parts = [_split(cores, sharing, self.name) for cores in near]
        return "list:" + ":".join(parts[rank % len(near)][rank // len(near)] for rank in range(ppn))

    def bound_cores(self, ppn: int) -> int | None:
        """Return how many cores ``cpu_binding`` leaves the rank that has fewest; None: all that the node has for it."""
        kind, _, parts = self.cpu_binding(ppn).partition(":")
        if kind != "list":
            return None
        return min(len(numbers(cores)) for cores in parts.split(":"))


def fill(text: str, **words: object) -> str:
    """Return ``text`` with each {word} of ``words`` replaced by its value; all other braces stay as they are."""
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", str(value))
    return text


def _split(cores: str, parts: int, site: str) -> list[str]:
    if parts == 1:
        return [cores]
    near = sorted(numbers(cores))
    each = len(near) // parts
    if each == 0:
        raise ConfigError(f"--ppn: {site} has {len(near)} cores near each device, too few for {parts} ranks on it")
    return [f"{near[i * each]}-{near[(i + 1) * each - 1]}" for i in range(parts)]


def numbers(cores: str) -> set[int]:
    """Return the cores that a text such as 8-15,40 names."""
    ranges = (part.partition("-") for part in cores.split(","))
    return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}


def find(wanted: str | None, host: str, env: Mapping[str, str]) -> tuple[Site | None, str]:
    """Return the site (None: an unknown one), and what told it.

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
            f"your own go into {own_folder(env)}"
        )
    # The user's own come last in the table and first in the search.
    for name in reversed(files):
        ours = os.path.dirname(files[name]) == OWN
        site = load(files[name], trusted=ours)
        if site.matches(host, env):
            return site, "recognised" if ours else f"recognised by {files[name]}"
    return None, "none of the known sites"


def site_files(env: Mapping[str, str]) -> dict[str, str]:
    """Return the site files by name; the user's own take the place of ours."""
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
        trusted: leave out site_check.py, which compiles every pattern; a test makes them for our own.

    Raises:
        ConfigError: the file cannot be read, or a key or value of it cannot be used; names all of them.
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
        since = f", in what begins at line {begin.line + 1}" if begin and mark and begin.line < mark.line else ""
        why = f"{error.problem or error.context}{since}"
        raise ConfigError(f"site file {path}{where}: {why} (a text with any of : # [ {{ needs quotes)") from None
    except (ValueError, yaml.YAMLError) as error:
        # Not UTF-8, characters that YAML does not have, a date that does not exist.
        raise ConfigError(f"site file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"site file {path} should hold keys and values")
    known = {f.name: f for f in fields(Site) if f.name != "name"}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            problems.append(f"unknown key '{key}'{nearest(str(key), known)}")
            continue
        default: Any = known[key].default
        if default is MISSING:
            default = {}
        kind = int if default is None else list if default == () else type(default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            problems.append(f"{key}: {value!r} should be {KINDS[kind]}")
            continue
        values[key] = value
    if not trusted:
        from wordrun.launch import site_check

        if "scheduler" not in content:
            problems.append("scheduler is missing: it should be pbs or slurm")
        problems += site_check.mismatches(values)
        problems = problems or site_check.contradictions(values)
    if problems:
        raise ConfigError("\n".join(f"site file {path}: {problem}" for problem in problems))
    lists = {key: tuple(map(str, value)) for key, value in values.items() if isinstance(value, list)}
    return Site(name=os.path.splitext(os.path.basename(path))[0], **{**values, **lists})


def _yaml(folder: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.yaml")))
