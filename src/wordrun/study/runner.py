"""Runs the points of a study or a sweep that have no result, here or as jobs, and records them in points.csv."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordrun.common.errors import UserError, first_line, lines_without_pages
from wordrun.launch.output_tail import reason_in
from wordrun.study import jobs
from wordrun.study.launch_pool import LaunchPool
from wordrun.study.placements import Placement
from wordrun.study.points import DONE, FAILED, IMPOSSIBLE, SUBMITTED, WAITING, Point, Points
from wordrun.study.progress import Progress, Result, varied
from wordrun.track.run_json import NO_REASON, RunRecord, load

Figures = Callable[[RunRecord], dict[str, Any]]
"""Returns the study's own columns for a finished run; a UserError marks the point as failed."""
SHOWN = {DONE: "finished", "": "running", WAITING: "running"}
"""How the states of rows are shown for points that are not run now."""


@dataclass
class Runner:
    """Runs points and records them."""

    table: Points
    """The points' table, open."""
    command: Sequence[str]
    """What starts wordrun, and the arguments that all points share before their overrides."""
    launch: Sequence[str]
    """The options of launch that all points share."""
    figures: Figures
    """Returns the study's own columns of a finished run."""
    job: jobs.Job
    """Returns the options of launch that submit some points as one job."""
    again: bool = False
    """Whether failed points are run again."""

    def run(
        self,
        points: Sequence[Point],
        free: Sequence[Placement],
        result: Result,
        nodes: Callable[[Point], int] = lambda point: 1,
    ) -> int:
        """Run all points without a result in the placements ``free``; return the exit status.

        Args:
            points: the points.
            free: where they can run at the same time.
            result: returns what to show of the row of a finished point.
            nodes: returns how many of the placements a point takes.

        Raises:
            UserError: a point cannot be started, there is no room on the disk, or points.csv cannot be written.
        """
        todo, others = self.open(points)
        what, sizes = f"{self.table.what} {self.table.folder}", {point.name: nodes(point) for point in todo}
        at_once = min(len(free), len(todo))
        print(f"{what}: {_count(len(todo))}, {at_once} at a time{_not_run(others)}", flush=True)
        progress = Progress(self.table, others, result, varied(points))
        with LaunchPool(self.table.folder, self.command, self.launch, free) as pool:
            while pool.running or (todo and not pool.ending):
                while todo and sizes[todo[0].name] <= len(pool.free) and not pool.ending:
                    pool.start(todo[0], sizes[todo[0].name])
                    progress.started(todo.pop(0))
                for ended in pool.wait():
                    progress.ended(ended, self.record(ended.point, ended.state))
                    self.check_disk(ended.point)
        print(f"{what}: {progress.summary(points)}", flush=True)
        return pool.exit_status if pool.ending else int(FAILED in progress.states.values())

    def submit(self, points: Sequence[Point], size: int, remedy: str, save: Callable[[], None] = lambda: None) -> None:
        """Submit jobs for all points without a result.

        Args:
            points: the points.
            size: how many of them share a job.
            remedy: what to do if a queue does not take so many jobs.
            save: called before the first job is submitted, if nothing is wrong with the options.

        Raises:
            ConfigError: an option is missing or not allowed.
            SubmitError: the scheduler rejects a job; those before it stay submitted.
        """
        todo, others = self.open(points)
        print(f"{self.table.what} {self.table.folder}: {_count(len(todo))} to submit{_not_run(others)}")
        if todo:
            chunks = [todo[start : start + size] for start in range(0, len(todo), size)]
            jobs.check(self.table, self.job(chunks[0]), len(chunks), remedy)
            save()
            jobs.submit(self.table, chunks, self.job)

    def open(self, points: Sequence[Point]) -> tuple[list[Point], dict[str, str]]:
        """Return the points that have to be run, and the states of the others by their names.

        Points whose runs or jobs have ended meanwhile are recorded.
        """
        self.table.check(points)
        todo = [point for point in points if not self._needs_no_run(point)]
        others = {point.name: self.table.state(point) for point in points if point not in todo}
        return todo, {name: SHOWN.get(state, state) for name, state in others.items()}

    def record(self, point: Point, state: str, output: Path | None = None) -> str:
        """Write the row of a point and return how it has ended. A stopped point gets no row, so that it is continued.

        Args:
            point: a point whose run or job has ended.
            state: finished, failed or stopped.
            output: the file with everything that it printed; None: the point's own.
        """
        reason, values = "", {}
        if state == "stopped":
            return state
        try:
            run = load(point.dir)
            values = _origin(run)
            if state == "finished":
                self.table.put([point], DONE, **values, **self.figures(run))
                return state
            reason = str(run.facts.get("exit_reason", ""))
        except UserError as error:  # there is no run directory, or a figure is missing
            reason = first_line(error) if values else ""
        if reason in (*NO_REASON, "finished"):
            before = self.table.rows.get(point.name, {})
            it = before["reason"] if before.get("state") == SUBMITTED else "it"
            reason = _last_line(output or point.log) or f"{it} printed nothing"
        self.table.put([point], FAILED, reason, **values)
        return FAILED

    def check_disk(self, point: Point) -> None:
        """End everything if a point had no room on the disk.

        Raises:
            UserError: the point had no room, and the next points would have none either.
        """
        if self._lacked_room(point):
            raise UserError(
                f"{point.name} ran out of disk space. Free some, then start the {self.table.what} again: it repeats "
                "this point"
            )

    def _lacked_room(self, point: Point) -> bool:
        """Return whether a point failed because the disk was full, or its user's quota was."""
        reason = self.table.rows.get(point.name, {}).get("reason", "")
        full = any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EDQUOT))
        return self.table.state(point) == FAILED and full

    def _needs_no_run(self, point: Point) -> bool:
        """Return whether ``point`` needs no run; write its row if its run or its job has ended and it has none yet."""
        state = self.table.state(point)
        if point.problem and state != IMPOSSIBLE:
            self.table.put([point], IMPOSSIBLE, point.problem)
        if point.problem or state == DONE:
            return True
        run = point.state()
        if run == "finished":  # a job, a failed point that was restarted, or the disk was full
            return self.record(point, run) != FAILED or not self.again
        if run == "running" and (point.run_id or state == SUBMITTED):
            return True
        if state == SUBMITTED and not self.table.subset:
            job, ids = self.job([point]), self.table.rows[point.name]["reason"].split()[1:]
            left = jobs.are_left(job, ids)
            if left is not False:
                return left or not self.again
            own = point.log if point.log.exists() else jobs.output(job, ids[-1])
            self.record(point, FAILED, own)
        return self.table.state(point) == FAILED and not (self.again or self._lacked_room(point))


def _origin(run: RunRecord) -> dict[str, Any]:
    """Return the columns that say where and with what a run was made."""
    facts, launch = run.facts, run.launches[-1] if run.launches else {}
    world = facts.get("world") or {}
    return {
        "ranks": world.get("size"),
        "nodes": world.get("nodes"),
        "started": facts.get("start"),
        "device": facts.get("device_name"),
        "site": launch.get("site"),
        "commit": facts.get("wordrun_commit", facts.get("git_commit")),
        "versions": "; ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items()),
        "hosts": " ".join(run.hosts[:8]),
    }


def _count(points: int) -> str:
    return f"{points} point{'s' * (points != 1)}"


def _not_run(states: Mapping[str, str]) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
    return f"; not run: {counts}" if counts else ""


def _last_line(file: Path) -> str:
    """Return the last line of a run's output that says why it failed; empty: it printed nothing."""
    try:
        lines = lines_without_pages(file.read_text(errors="replace"))
    except OSError:
        return ""
    return reason_in([line for line in lines if not line.startswith("$ launch ")])
