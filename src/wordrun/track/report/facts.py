"""The tables of a report: options that are not the defaults, environment, launches, slowest ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wordrun.common.errors import UserError
from wordrun.common.files import read_bytes
from wordrun.track.metrics_jsonl import Metrics
from wordrun.track.run_json import RunRecord

SAMPLES = 3
"""Number of generated texts shown: the latest."""
NOT_COMPARED = ("run_dir", "data.path")
PROFILES = 4
"""Number of profiles shown."""
LONG = 20_000
"""Maximum number of characters shown of a profile."""
SHORT = 2000
"""Maximum number of characters shown of a failure's record, from its end."""


def options(run_dir: Path) -> dict[str, Any]:
    """Return the options of a run by name, such as ``train.max_iters``; empty if its config cannot be read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        text = read_bytes(run_dir / "config.yaml").decode()
        content = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
    except (ValueError, RecursionError, OmegaConfBaseException, YAMLError):
        return {}
    return dict(_flat(content)) if isinstance(content, dict) else {}


def _flat(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def defaults() -> dict[str, Any]:
    """Return the options of ``wordrun`` without arguments; empty if they cannot be composed here."""
    from wordrun.config.compose import compose
    from wordrun.config.schema import to_plain

    try:
        return dict(_flat(to_plain(compose())))
    except UserError:
        return {}


def differences(run_dir: Path) -> list[tuple[str, Any, Any]]:
    """Return the options that are not the defaults: name, value, and default, which is None if there is none."""
    usual = defaults()
    return [
        (name, value, usual.get(name))
        for name, value in options(run_dir).items()
        if name not in NOT_COMPARED and value != {} and (name not in usual or usual[name] != value)
    ]


def environment(record: RunRecord) -> dict[str, str]:
    """Return the run's ranks, hosts, devices, commits and versions, as texts by their labels."""
    facts, world = record.facts, record.facts.get("world") or {}
    launch = record.launches[-1] if record.launches else {}
    hosts, nodes = record.hosts, world.get("nodes", 1)
    versions = facts.get("versions") or {}
    shown = {
        "command": " ".join([*launch.get("launch", []), *launch.get("command", [])]),
        "ranks": f"{world['size']} on {nodes} node{'s' * (nodes > 1)}" if "size" in world else "",
        "hosts": ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""),
        "device": " ".join(str(facts[name]) for name in ("device_name", "dtype") if name in facts),
        "launcher": " ".join(filter(None, (launch.get("launcher"), launch.get("launcher_path")))),
        "scheduler": " ".join((launch["scheduler"], launch["job"])) if launch.get("job") else "",
        "site": launch.get("site") or "",
        "project commit": facts.get("project_commit") or "",
        "wordrun commit": facts.get("wordrun_commit") or facts.get("git_commit") or "",
        "data": str((facts.get("data") or {}).get("origin") or ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return {name: text for name, text in shown.items() if text}


def starts_of_run(record: RunRecord) -> list[dict[str, Any]]:
    """Return each time that the run was started, oldest first: start, end, from_step, to_step, how it ended."""
    facts = record.facts
    found = []
    for link in (*(facts.get("earlier") or []), facts):
        found.append(
            {
                "start": moment(link.get("start")),
                "end": moment(link.get("end")),
                "from_step": (link.get("resumed_from") or {}).get("step", 0),
                "to_step": link.get("steps", ""),
                "ranks": (link.get("world") or {}).get("size", ""),
                "ended": link.get("exit_reason", ""),
            }
        )
    return found


def slowest(metrics: Metrics, hosts: list[str], ranks: int) -> list[tuple[int, str, int, float]]:
    """Return the ranks that were the slowest most often: rank, host, number of intervals, mean delay [s]."""
    table = metrics.training
    if "slowest_rank" not in table or "slowest_by" not in table:
        return []
    counts: Counter[int] = Counter()
    delays: Counter[int] = Counter()
    for rank, delay in zip(table["slowest_rank"], table["slowest_by"], strict=True):
        if rank == rank and delay == delay:
            counts[int(rank)] += 1
            delays[int(rank)] += delay  # type: ignore[assignment]
    per_host = ranks // len(hosts) if hosts else 0
    return [
        (rank, hosts[rank // per_host] if per_host and rank // per_host < len(hosts) else "", n, delays[rank] / n)
        for rank, n in counts.most_common(5)
    ]


def samples(run_dir: Path) -> list[tuple[int, str]]:
    """Return the last generated texts with their steps, newest first."""
    text = read_bytes(run_dir / "samples.txt").decode(errors="replace")
    found = re.findall(r"^--- step (\d+) ---\n(.*?)(?=^--- step \d+ ---\n|\Z)", text, flags=re.M | re.S)
    return [(int(step), body.strip("\n")) for step, body in found[: -SAMPLES - 1 : -1]]


def failures(run_dir: Path) -> list[tuple[str, str]]:
    """Return the names and ends of the files in failures/."""
    files = sorted((run_dir / "failures").glob("*.txt"))[:5]
    return [(file.name, read_bytes(file).decode(errors="replace")[-SHORT:]) for file in files]


def tables(run_dir: Path) -> list[tuple[str, str]]:
    """Return the names and beginnings of the profiles that are text."""
    found = sorted((run_dir / "profile").glob("*.txt"), key=lambda file: (len(file.name), file.name))[:PROFILES]
    return [(file.name, read_bytes(file).decode(errors="replace")[:LONG]) for file in found]


def files(run_dir: Path) -> list[str]:
    """Return other files of the run that are worth opening, relative to the run directory."""
    found = [*run_dir.glob("plots/*.png"), *run_dir.glob("profile*/**/*.html"), *run_dir.glob("profile*/**/*.txt")]
    return [str(file.relative_to(run_dir)) for file in sorted(found)[:20]]


def moment(text: Any) -> str:
    """Return a time of run.json, such as 2026-01-02T10:00:00+0000, for people to read."""
    return str(text or "")[:19].replace("T", " ")


def duration(seconds: Any) -> str:
    """Return a duration for people to read."""
    if not isinstance(seconds, int | float):
        return ""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours} h {minutes % 60} min"
    if minutes:
        return f"{minutes} min" + (f" {int(seconds % 60)} s" if minutes < 10 else "")
    return f"{seconds:.1f} s"
