"""``hydra/launcher=wordrun`` and ``wordrun sweep DIR``: run the points of a sweep."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError, UserError, show
from wordrun.common.files import replace as replace_file
from wordrun.common.run_dir import drop_ids_of_one_run, new_run_id
from wordrun.launch import site_files
from wordrun.launch.options import Options
from wordrun.launch.schedulers.base import node_count, total_ranks
from wordrun.launch.site import Site
from wordrun.study import jobs, placements
from wordrun.study.launch_pool import command_of
from wordrun.study.options import LauncherOptions
from wordrun.study.points import DONE, WAITING, Point, Points, best
from wordrun.study.runner import Runner
from wordrun.track.run_json import RunRecord

USAGE = """\
Start a sweep, one run for each combination of the values (as `wordrun -m`), or run the unfinished points of a sweep
that was started with `hydra/launcher=wordrun`.

  wordrun sweep optimizer.learning_rate=1e-3,3e-4 train.seed=1,2
  wordrun sweep outputs/sweeps/20260102-030405-abcd        # all of them
  wordrun sweep outputs/sweeps/20260102-030405-abcd 2 3    # some
"""
FILE = "sweep.json"
VERSION = 1
"""Version of the columns of points.csv."""
COLUMNS = ("metric", "best")
REMEDY = "hydra.launcher.points_per_job=N puts N points into a job"


@dataclass
class Sweep:
    """A sweep: the contents of sweep.json, and its points, in points.csv. As a context manager, it is locked."""

    dir: Path
    id: str
    """The points' run IDs begin with it."""
    command: list[str]
    """What starts wordrun, and the arguments that all points share before their overrides."""
    options: LauncherOptions
    table: Points
    metric: str = ""
    """The metric that is recorded of each point; empty: the runs' train.best_metric."""
    higher: bool = False
    """Whether higher values of it are better."""
    is_new: bool = False
    """Whether there was no sweep in the folder before."""

    def __post_init__(self) -> None:
        self.points: list[Point] = []

    @classmethod
    def open(cls, folder: Path, *, subset: bool = False) -> Sweep | None:
        """Return the sweep in ``folder``; None: there is none. ``subset``: only some of its points are run.

        Raises:
            ConfigError: sweep.json cannot be read.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            text: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            options = LauncherOptions(**text["options"])
            return cls(folder, text["id"], text["command"], options, table_of(folder, subset))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): choose another hydra.sweep.dir") from None

    @classmethod
    def create(cls, folder: Path, command: Sequence[str], options: LauncherOptions) -> Sweep:
        """Return the sweep in ``folder``, a new one if there is none, with this command and these options.

        Raises:
            ConfigError: there is none, and ``options.resume`` is set.
        """
        found = cls.open(folder)
        if options.resume and not found:
            raise ConfigError(
                f"hydra.launcher.resume=true: there is no sweep in {folder}; set its folder with hydra.sweep.dir=DIR"
            )
        own_id = found.id if found else new_run_id()
        return cls(folder, own_id, list(command), options, table_of(folder), is_new=not found)

    def __enter__(self) -> Sweep:
        """Lock the folder, and read the points.

        Raises:
            UserError: another process uses it, or it contains something else.
        """
        self.table.__enter__()
        for row in self.table.rows.values():
            self._append(row["point"], shlex.split(row["overrides"]), row["run_dir"])
        return self

    def __exit__(self, *exception: object) -> None:
        """Unlock the folder."""
        self.table.__exit__(*exception)

    def _append(self, name: str, overrides: Sequence[str], subdir: str) -> Point:
        self.points.append(Point(name, self.dir / subdir, tuple(overrides), run_id=f"{self.id}-{name}"))
        return self.points[-1]

    def find(self, overrides: Sequence[str]) -> Point | None:
        """Return the point with these overrides."""
        return next((point for point in self.points if point.overrides == tuple(overrides)), None)

    def add(self, overrides: Sequence[str], subdir: Callable[[Sequence[str], int], str]) -> Point:
        """Return the point with these overrides, or add it; ``subdir`` returns its run directory below the folder.

        Raises:
            ConfigError: another point has the same directory.
        """
        if found := self.find(overrides):
            return found
        number = max((int(point.name) for point in self.points), default=-1) + 1
        own = subdir(overrides, number)
        if same := [each.name for each in self.points if each.dir == self.dir / own]:
            raise ConfigError(f"hydra.sweep.subdir={own} is the same for points {same[0]} and {number}")
        return self._append(str(number), overrides, own)

    def save(self) -> None:
        """Write sweep.json, and rows of the points that have none.

        Raises:
            UserError: a file cannot be written.
        """
        facts = {"id": self.id, "command": self.command, "options": asdict(self.options)}
        try:
            if self.is_new:  # where the file system has no locks, another process may begin one at this moment
                os.close(os.open(self.dir / FILE, os.O_CREAT | os.O_EXCL, 0o666))
                self.is_new = False
            replace_file(self.dir / FILE, json.dumps(facts, indent=2) + "\n")
        except FileExistsError:
            raise ConfigError(
                f"hydra.sweep.dir={self.dir}: another process has begun a sweep there: choose another folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.dir / FILE}: {error.strerror}; choose another folder with hydra.sweep.dir=DIR"
            ) from None
        self.table.put([point for point in self.points if not self.table.state(point)], WAITING)

    def runner(self) -> Runner:
        """Return what runs its points."""
        launch = self.options.launch()
        return Runner(self.table, self.command, launch, self.measured, self.job, again=True)

    def measured(self, run: RunRecord) -> dict[str, Any]:
        """Return the columns of a run: its best value of the metric."""
        metric, higher = (self.metric, self.higher) if self.metric else (run.best_metric, run.higher_is_better)
        return {"metric": metric, "best": best(run.path, metric, higher=higher)}

    def job(self, chunk: Sequence[Point]) -> Options:
        """Return the options of launch that submit one job for the points ``chunk``.

        Raises:
            ConfigError: an option is not valid.
        """
        options, launch = self.options, self.options.launch(submit=True)
        if options.points_per_job == 1:
            return jobs.named(launch, chunk[0], command_of(self.command, chunk[0]), "sweep")
        names = [point.name for point in chunk]
        parsed = jobs.named(launch, chunk[0], [*self.command[:3], "sweep", os.path.abspath(self.dir), *names], "sweep")
        site, _ = site_files.find(parsed.site, socket.gethostname(), os.environ)
        return together(options, parsed, site, len(chunk))


def launch(
    folder: Path,
    command: Sequence[str],
    options: LauncherOptions,
    batch: Sequence[Sequence[str]],
    subdir: Callable[[Sequence[str], int], str],
) -> int:
    """Run a batch of points, or submit jobs that do; return the exit status.

    Args:
        folder: hydra.sweep.dir.
        command: what starts wordrun, and the arguments that all points share before their overrides.
        options: the options of hydra/launcher=wordrun.
        batch: the overrides of each point.
        subdir: returns the run directory below ``folder`` of a new point with these overrides and this number.

    Raises:
        ConfigError: the folder contains another sweep, or not even one point fits.
    """
    # A job that SLURM has requeued, or the next one of a chain, continues the sweep.
    if os.environ.get("WORDRUN_RESUME") and (folder / FILE).exists():
        options = replace(options, resume=True)
    with Sweep.create(folder, command, options) as sweep:
        if sweep.points and not options.resume:
            raise ConfigError(
                f"hydra.sweep.dir={folder} already contains a sweep of {len(sweep.points)} points: continue it with "
                "hydra.launcher.resume=true, or choose another folder",
                page="sweeps.md#continuing-a-sweep",
            )
        points = [sweep.add(overrides, subdir) for overrides in batch]
        if not options.submit:
            return run(sweep, points)
        sweep.runner().submit(points, options.points_per_job, REMEDY, sweep.save)
        print(f"wordrun ls {folder} shows the runs; the same command with hydra.launcher.resume=true ", end="")
        print(f"hydra.sweep.dir={folder} submits the unfinished points")
        return 0


def run(sweep: Sweep, points: Sequence[Point]) -> int:
    """Run those of ``points`` that have not finished, and return the exit status."""
    found = placements.find(sweep.options)
    if not sweep.table.subset:
        sweep.save()
    status = sweep.runner().run(points, found, result)
    if any(sweep.table.state(point) != DONE for point in points):
        print(f"wordrun sweep {sweep.dir} runs the unfinished points", flush=True)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``wordrun sweep KEY=VALUE,...`` or ``wordrun sweep DIR [NUMBER...]`` and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0 if arguments else ConfigError.exit_status
    if any("=" in word for word in arguments) and not Path(arguments[0], FILE).exists():
        from wordrun.commands import train

        return train.main(["--multirun", *arguments])
    drop_ids_of_one_run()
    folder, *numbers = arguments
    try:
        sweep = Sweep.open(Path(folder), subset=bool(numbers))
        if sweep is None:
            raise ConfigError(f"{folder} contains no sweep: there is no {FILE}")
        if (sweep.dir / "study.db").exists():
            raise ConfigError(f"{folder} is an Optuna search: repeat its command to continue it")
        with sweep:
            known = {point.name: point for point in sweep.points}
            if unknown := [word for word in numbers if word not in known]:
                raise ConfigError(f"{unknown[0]} is not a point of {folder}, which has points 0 to {len(known) - 1}")
            return run(sweep, [known[word] for word in numbers] or sweep.points)
    except UserError as error:
        return show(error)


def result(row: Mapping[str, str]) -> str:
    """Return what to show of the row of a finished point."""
    return f"best {row['metric']} {float(row['best']):.4f}" if row["best"] else ""


def table_of(folder: Path, subset: bool = False) -> Points:
    """Return the points of the sweep in ``folder``."""
    return Points(folder, "sweep", VERSION, COLUMNS, "hydra.sweep.dir", subset=subset)


def together(options: LauncherOptions, parsed: Options, site: Site, count: int) -> Options:
    """Return ``parsed``, the options for one point, with the nodes and ranks that ``count`` points need together."""
    nodes = node_count(parsed, site)
    ranks = total_ranks(parsed, site)
    slots = site.ranks_per_node or site.devices or 0
    per_node = max(1, slots // ranks) if nodes == 1 else 1
    wanted = options.job_nodes or (-(-count // per_node) if nodes == 1 else nodes * count)
    if wanted < nodes:
        raise ConfigError(f"hydra.launcher.job_nodes={wanted}: one point needs {nodes} nodes; use {nodes} or more")
    ppn = per_node * -(-ranks // nodes)
    return replace(parsed, np=None, nodes=wanted, ppn=ppn)
