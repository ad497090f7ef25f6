"""``hydra/launcher=wordrun`` and ``wordrun sweep DIR``: run the points of a sweep."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from wordrun.errors import REQUEUE, ConfigError, UserError, show
from wordrun.sweep import placements
from wordrun.sweep.folder import Point, Sweep
from wordrun.sweep.options import LauncherOptions
from wordrun.sweep.pool import Ended, Pool
from wordrun.sweep.table import LiveTable

USAGE = """\
Run the unfinished points of a sweep that `wordrun -m ... hydra/launcher=wordrun` has recorded in sweep.json.

  wordrun sweep outputs/sweeps/20260102-030405        # all of them
  wordrun sweep outputs/sweeps/20260102-030405 2 3    # some
"""


def launch(
    folder: Path, command: Sequence[str], options: LauncherOptions, batch: Sequence[Sequence[str]],
    subdir: Callable[[Sequence[str], int], str],
) -> int:  # fmt: skip
    """Run a batch of points, or submit jobs that do; return the exit status.

    Args:
        folder: hydra.sweep.dir.
        command: what starts wordrun, and the arguments that all points share before their overrides.
        options: the launcher's.
        batch: the overrides of each point.
        subdir: returns the run directory below ``folder`` of a new point with these overrides and this number.

    Raises:
        ConfigError: the folder contains another sweep, or not even one point fits.
    """
    # A job that SLURM has requeued, or the next one of a chain, continues the sweep.
    if os.environ.get("WORDRUN_RESUME") and Sweep.load(folder):
        options = replace(options, resume=True)
    sweep = Sweep.create(folder, command, options)
    points = [sweep.find(overrides) or sweep.add(overrides, subdir(overrides, sweep.number())) for overrides in batch]
    if options.submit:
        from wordrun.sweep import jobs

        return jobs.submit(sweep, [point for point in points if point.state() not in ("finished", "running")])
    found = placements.find(options)
    sweep.save()
    return run(sweep, points, found)


def run(sweep: Sweep, points: Sequence[Point], found: Sequence[placements.Placement]) -> int:
    """Run those of ``points`` that have not finished, in the placements ``found``, and return the exit status."""
    states = {point.number: point.state() for point in points}
    todo = deque(point for point in points if states[point.number] not in ("finished", "running"))
    skipped = len(points) - len(todo)
    at_once = min(len(found), len(todo))
    done = f"; {skipped} already finished or running" if skipped else ""
    print(f"sweep {sweep.dir}: {len(todo)} point{'s' * (len(todo) != 1)}, {at_once} at a time{done}", flush=True)
    with Pool(sweep, found) as pool:
        progress = LiveTable(sweep, pool)
        progress.set_states({number: state for number, state in states.items() if state in ("finished", "running")})
        with progress:
            while pool.running or (todo and not pool.ending):
                while todo and pool.free and not pool.ending:
                    pool.start(todo[0])
                    progress.started(todo.popleft())
                for ended in pool.wait():
                    progress.ended(ended, outcome(ended, asked=bool(pool.ending)))
                progress.draw()
    text = progress.summary()
    missing = any(state != "finished" for state in progress.states.values()) or bool(todo)
    print(f"sweep {sweep.dir}: {text}", flush=True)
    if missing:
        print(f"wordrun sweep {sweep.dir} runs the unfinished points", flush=True)
    if pool.ending:
        return REQUEUE if pool.ending in (REQUEUE, 15) else 128 + pool.ending
    return int(any(state == "failed" for state in progress.states.values()))


def outcome(ended: Ended, *, asked: bool) -> str:
    """Return how a point has ended, in a word; ``asked``: whether it was asked to stop."""
    if ended.status == 0:
        return "finished"
    return "stopped" if asked or ended.status in (REQUEUE, 130, 143) else "failed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``wordrun sweep DIR [NUMBER...]`` and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0 if arguments else ConfigError.exit_status
    try:
        sweep = Sweep.load(Path(arguments[0]))
        if sweep is None:
            raise ConfigError(f"{arguments[0]} contains no sweep: there is no sweep.json")
        if (sweep.dir / "study.db").exists():
            raise ConfigError(f"{arguments[0]} is an Optuna search: repeat its command to continue it")
        known = {str(point.number): point for point in sweep.points}
        if unknown := [word for word in arguments[1:] if word not in known]:
            raise ConfigError(f"{unknown[0]} is not a point of {arguments[0]}, which has points 0 to {len(known) - 1}")
        points = [known[word] for word in arguments[1:]] or sweep.points
        found = placements.find(sweep.options)
        return run(sweep, points, found)
    except UserError as error:
        return show(error)
