"""The folder of a sweep: sweep.json, which names its points, and each point's run directory and log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wordrun.errors import ConfigError, lines_without_pages
from wordrun.files import replace
from wordrun.run_id import new_run_id
from wordrun.runs import metrics
from wordrun.runs.record import NO_REASON, load, read_json
from wordrun.sweep.options import LauncherOptions

FILE = "sweep.json"


@dataclass(frozen=True)
class Point:
    """One point of a sweep."""

    number: int
    overrides: tuple[str, ...]
    """What is different from other points, and all other options."""
    dir: Path
    """Its run directory."""

    @property
    def log(self) -> Path:
        """The file with everything that its launches print."""
        return self.dir.with_name(f"{self.dir.name}.log")

    def state(self) -> str:
        """Return the state of its run: new, running, finished, stopped, failed, died or silent."""
        if not (self.dir / "run.json").exists():
            return "failed" if self.log.exists() else "new"
        record = load(self.dir)
        state = record.state()
        # A run that a hook has ended early, such as early_stop, is complete as well.
        complete = state == "failed" and record.launches and record.launches[-1].get("exit_status") == 0
        return "finished" if complete else state

    def best(self, metric: str, *, higher: bool) -> float | None:
        """Return the best finite value of ``metric`` in its evaluations; None: there is none."""
        values = [value for _, value in self.evaluations(metric)]
        return (max if higher else min)(values) if values else None

    def evaluations(self, metric: str) -> list[tuple[int, float]]:
        """Return the steps and finite values of ``metric`` so far."""
        return metrics.evaluations(self.dir, metric)

    def reason(self) -> str:
        """Return why it failed: the run's own reason, or the last line of its log."""
        reason = str(read_json(self.dir / "run.json").get("exit_reason", ""))
        if reason not in (*NO_REASON, "finished"):
            return reason
        output = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return next(reversed(lines_without_pages(output)), "")


@dataclass
class Sweep:
    """A sweep as its folder describes it."""

    dir: Path
    id: str
    """The points' run IDs begin with it."""
    command: list[str]
    """What starts wordrun, and the arguments that all points share before their overrides."""
    options: LauncherOptions
    points: list[Point] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)
    """The job that was last submitted for a point, by the point's number."""

    @classmethod
    def load(cls, folder: Path) -> Sweep | None:
        """Return the sweep in ``folder``; None: there is none.

        Raises:
            ConfigError: sweep.json cannot be read.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            text: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            options = LauncherOptions(**text["options"])
            sweep = cls(folder, text["id"], text["command"], options, jobs=text.get("jobs", {}))
            for each in text["points"]:
                sweep.points.append(Point(each["number"], tuple(each["overrides"]), folder / each["dir"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): choose another hydra.sweep.dir") from None
        return sweep

    @classmethod
    def create(cls, folder: Path, command: Sequence[str], options: LauncherOptions) -> Sweep:
        """Return the sweep in ``folder``, a new one if there is none, with this command and these options.

        Raises:
            ConfigError: there is one, and ``options.resume`` is not set.
        """
        found = cls.load(folder)
        if found and found.points and not options.resume:
            raise ConfigError(
                f"hydra.sweep.dir={folder} already contains a sweep of {len(found.points)} points: continue it with "
                "hydra.launcher.resume=true, or choose another folder",
                page="sweeps.md#continuing-a-sweep",
            )
        if options.resume and not found:
            raise ConfigError(
                f"hydra.launcher.resume=true: there is no sweep in {folder}; set its folder with hydra.sweep.dir=DIR"
            )
        if found:
            return cls(folder, found.id, list(command), options, found.points, found.jobs)
        return cls(folder, new_run_id(), list(command), options)

    def find(self, overrides: Sequence[str]) -> Point | None:
        """Return the point with these overrides."""
        return next((point for point in self.points if point.overrides == tuple(overrides)), None)

    def number(self) -> int:
        """Return the number of the next new point."""
        return max((point.number for point in self.points), default=-1) + 1

    def add(self, overrides: Sequence[str], subdir: str) -> Point:
        """Add a point whose run directory is ``subdir`` of the folder.

        Raises:
            ConfigError: another point has the same directory.
        """
        point = Point(self.number(), tuple(overrides), self.dir / subdir)
        if same := [each.number for each in self.points if each.dir == point.dir]:
            raise ConfigError(f"hydra.sweep.subdir={subdir} is the same for points {same[0]} and {point.number}")
        self.points.append(point)
        return point

    def save(self) -> None:
        """Write sweep.json.

        Raises:
            ConfigError: the file cannot be written.
        """
        points = [
            {"number": each.number, "overrides": each.overrides, "dir": str(each.dir.relative_to(self.dir))}
            for each in self.points
        ]
        facts = {"id": self.id, "command": self.command, "options": asdict(self.options), "points": points}
        facts |= {"jobs": self.jobs} if self.jobs else {}
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            replace(self.dir / FILE, json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.dir / FILE}: {error.strerror}; choose another folder with hydra.sweep.dir=DIR"
            ) from None

    def varied(self) -> list[tuple[str, ...]]:
        """Return for each point the overrides that not all points share."""
        shared = set.intersection(*(set(point.overrides) for point in self.points)) if len(self.points) > 1 else set()
        return [tuple(word for word in point.overrides if word not in shared) for point in self.points]
