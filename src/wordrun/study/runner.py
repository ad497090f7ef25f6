"""Runs the points of a study with ``launch``: one after the other, side by side on disjoint nodes, or as jobs."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wordrun import interrupts, log
from wordrun.errors import REQUEUE, ConfigError, UserError, first_line, lines_without_pages
from wordrun.launch import processes, site_files
from wordrun.launch.job import Job
from wordrun.launch.output_tail import reason_in
from wordrun.launch.parser import parse
from wordrun.launch.planner import look_around
from wordrun.launch.request import Ranks
from wordrun.launch.schedulers.base import node_count, total_ranks
from wordrun.log import LOGGER
from wordrun.runs.record import NO_REASON, RunRecord, load
from wordrun.study import jobs
from wordrun.study.points import DONE, FAILED, IMPOSSIBLE, SUBMITTED, Points, StudyPoint

POLL_S = 0.1
ENDED = (REQUEUE, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of a launch that was stopped from outside, such as at the end of an allocation."""

GONE = {
    "--bandwidth": "a study measures the time of a step, and no longer estimates it: leave it out",
    "--no-calibrate": "nothing is measured before the points any more: leave it out",
}
"""Options that studies no longer have, and what to use instead."""

Figures = Callable[[StudyPoint, RunRecord], dict[str, Any]]
"""Returns the study's own columns for a finished run; a UserError marks the point as failed."""
Result = Callable[[Mapping[str, str]], str]
"""Returns what to show of the row of a finished run."""


def new_parser(study: str, description: str) -> argparse.ArgumentParser:
    """Return a parser to which a study adds its own options; see ``parse_study``."""
    return argparse.ArgumentParser(
        f"wordrun study {study}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip


def parse_study(
    parser: argparse.ArgumentParser, argv: Sequence[str], chosen: Sequence[str], by: str
) -> argparse.Namespace:
    """Add the options of every study and the overrides, and parse ``argv``.

    Args:
        parser: has the study's own options.
        argv: the words after the study's name.
        chosen: keys that the study chooses.
        by: the options of the study that choose them, for people to read.

    Raises:
        ConfigError: an override has one of the keys in ``chosen``.
    """
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results and the runs")
    parser.add_argument("--retry-failed", action="store_true", help="run failed points again")
    parser.add_argument("--submit", action="store_true", help="submit a job for each point instead of running it here")
    parser.add_argument("--launch", default=[], type=shlex.split, metavar='"..."', help="further options of launch")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of every run")
    for word in argv:
        if (name := word.partition("=")[0]) in GONE:
            raise ConfigError(f"{name} was removed: {GONE[name]}")
    args = parser.parse_intermixed_args(argv)
    if wrong := [each for each in args.overrides if each.partition("=")[0].lstrip("+") in chosen]:
        raise ConfigError(f"{', '.join(wrong)}: the study sets this itself ({by})")
    return args


def conduct(
    args: argparse.Namespace, opened: Points, points: Callable[[Points], Iterable[StudyPoint]], figures: Figures,
    write: Callable[[Path, Sequence[Mapping[str, str]]], Iterable[Path]], result: Result = lambda row: DONE,
) -> int:  # fmt: skip
    """Run a study and return its exit status: 1 if a point failed, 75 if points are left for the next call.

    Args:
        args: the command line, as parsed by ``parse_study``.
        opened: the study's points.csv.
        points: returns the points.
        figures: reads a finished run.
        write: writes the results into a folder, given the rows of the points, and returns their files.
        result: returns what to show of the row of a finished run.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    screen = log.start(rank=0)
    try:
        with opened as file:
            wanted = list(points(file))
            complete = Runner(file, args, figures, result).run(wanted)
            rows = [file.rows[point.name] for point in wanted if point.name in file.rows]
            for path in write(file.folder, rows):
                LOGGER.info("%s", path)
    finally:
        screen.close()
    return REQUEUE * (not complete) or int(any(row["state"] == FAILED for row in rows))


def look(args: argparse.Namespace, words: Sequence[str]) -> tuple[Job, Ranks]:
    """Return the job, and the ranks of a point with the options ``words`` of launch.

    Raises:
        ConfigError: they contradict each other, or ask for more ranks than there can be.
    """
    if not args.submit:
        job, _, ranks = look_around(parse([*args.launch, *words, "--", "wordrun"]))
        return job, ranks
    options = parse([*args.launch, *words, "--submit", "--", "wordrun"])
    site, _ = site_files.find(options.site, socket.gethostname(), os.environ)
    nodes, np = node_count(options, site), total_ranks(options, site)
    layout = tuple(np // nodes + (at < np % nodes) for at in range(nodes))
    hosts, devices = tuple(f"node {at}" for at in range(nodes)), options.gpus or site.devices or 0
    return Job(hosts, (site.cores or 1,) * nodes, (devices,) * nodes, layout), Ranks(layout, "as submitted")


def launch_command(options: Sequence[str]) -> list[str]:
    """Return the launch with ``options``, up to the command that it starts."""
    return [sys.executable, "-m", "wordrun.launch", *options, "--"]


class Runner:
    """Runs points and records them.

    Args:
        file: the study's points.csv, open.
        args: the command line, as parsed by ``parse_study``.
        figures: reads a finished run.
        result: returns what to show of the row of a finished run.

    Raises:
        ConfigError: the study itself was started by launch.
    """

    def __init__(
        self, file: Points, args: argparse.Namespace, figures: Figures, result: Result = lambda row: DONE
    ) -> None:
        if "WORDRUN_LAUNCH_ID" in os.environ:
            raise ConfigError("a study starts launch itself: call it without launch, such as in a job script")
        self.file, self.args, self.figures, self.result = file, args, figures, result
        self.running: dict[subprocess.Popen[bytes], tuple[StudyPoint, list[str]]] = {}
        """The launches, with their points and hosts."""
        self.stopped = False
        self.env = {name: text for name, text in os.environ.items() if name not in ("WORDRUN_RUN_ID", "WORDRUN_RESUME")}

    def run(self, points: Sequence[StudyPoint]) -> bool:
        """Run all points without a result; return whether none is left for the next call.

        Raises:
            UserError: a point asks for more ranks than there can be, or points.csv cannot be written.
        """
        self.file.check(points)
        todo = [point for point in points if not self._settled(point)]
        LOGGER.info("%d points, %d of them to run; results in %s", len(points), len(todo), self.file.path)
        if self.args.submit:
            states = [self.file.rows.get(point.name, {}).get("state") for point in points if point not in todo]
            jobs.check([self._submission(point) for point in todo], states.count(SUBMITTED))
            for point in todo:
                self._submit(point)
        elif todo:
            job = look(self.args, ())[0]
            needs = {point.name: look(self.args, point.launch)[1].nodes for point in todo}
            with self._signals():
                self._run(todo, job, needs)
        if self.stopped:
            LOGGER.warning("stopped: start the study again to continue")
        states = [self.file.rows.get(point.name, {}).get("state") for point in points]
        if waiting := states.count(SUBMITTED):
            LOGGER.info("jobs without a result: %d; start the study again when they have ended", waiting)
        return not self.stopped and set(states) <= {DONE, FAILED, IMPOSSIBLE}

    def _run(self, todo: list[StudyPoint], job: Job, needs: dict[str, int]) -> None:
        free, count, total = list(job.hosts), 0, len(todo)
        screen = log.console()
        columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
            task = bar.add_task("points", total=total)
            while (todo and not self.stopped) or self.running:
                while todo and not self.stopped and needs[todo[0].name] <= len(free):
                    point = todo.pop(0)
                    hosts, free = free[: needs[point.name]], free[needs[point.name] :]
                    child = self._start(point, hosts if len(job.hosts) > 1 else [])
                    self.running[child] = point, hosts
                bar.update(task, description=", ".join(point.name for point, _ in self.running.values()))
                ended = [child for child in self.running if child.poll() is not None]
                for child in ended:
                    point, hosts = self.running.pop(child)
                    free += hosts
                    if self._was_stopped(point, child.returncode):
                        self.stopped = True
                    else:
                        self._record(point, self._output(point))
                        count += 1
                        row = self.file.rows[point.name]
                        text = row["reason"] if row["state"] == FAILED else self.result(row)
                        LOGGER.info("[%d/%d] %s: %s", count, total, point.name, text)
                        bar.update(task, completed=count)
                        if _lacked_room(row):  # so would the other points
                            raise UserError(
                                f"{point.name} ran out of disk space. Free some, then start the study again: it "
                                "repeats this point"
                            )
                if not ended:
                    time.sleep(POLL_S)

    def _was_stopped(self, point: StudyPoint, status: int) -> bool:
        """Return whether the run was ended from outside, so that the next call has to repeat it."""
        if status in ENDED or (status and self.stopped):
            return True
        try:  # after SIGTERM, a run without checkpoints ends with status 0
            return load(self._folder(point)).state() == "stopped"
        except UserError:
            return False

    def _settled(self, point: StudyPoint) -> bool:
        """Return whether ``point`` needs no run; record it if its run or its job has ended without that."""
        row = self.file.rows.get(point.name, {})
        state, run = row.get("state"), ""
        if state in (DONE, IMPOSSIBLE):
            return True
        with contextlib.suppress(UserError):
            run = load(self._folder(point)).state()
        if run == "finished":  # a job, a failed point that was restarted, or the disk was full
            self._record(point, self._output(point))
            return self.file.rows[point.name]["state"] == DONE or not self.args.retry_failed
        if state == SUBMITTED:
            ids, launch = row["reason"].split()[1:], self._submission(point)
            left = True if run == "running" else jobs.are_left(launch, ids)
            if left is not False:
                return left or not self.args.retry_failed
            self._record(point, jobs.output(launch, ids[-1]))
            LOGGER.info("%s: %s", point.name, self.file.rows[point.name]["reason"])
        return state in (FAILED, SUBMITTED) and not (self.args.retry_failed or _lacked_room(self.file.rows[point.name]))

    def _start(self, point: StudyPoint, hosts: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start launch for ``point`` on ``hosts``; empty: on this machine or the whole job."""
        shutil.rmtree(self._folder(point), ignore_errors=True)  # of a failed or stopped run
        output = self._output(point)
        where = []
        try:
            output.parent.mkdir(exist_ok=True)
            if hosts:
                named = output.with_suffix(".hosts")
                named.write_text("".join(f"{host}\n" for host in hosts))
                where = ["--hostfile", str(named)]
            command = self._command(point, [*self.args.launch, *point.launch, *where])
            with output.open("wb") as stream:
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                    env=self.env, preexec_fn=processes.before_exec(own_group=True, death_signal=signal.SIGTERM),
                )  # fmt: skip
        except OSError as error:
            raise UserError(f"cannot start {point.name}: {error.filename}: {error.strerror}") from None

    def _submit(self, point: StudyPoint) -> None:
        shutil.rmtree(self._folder(point), ignore_errors=True)
        job = jobs.submit(point.name, self._command(point, [*self._submission(point), "--json"]), self.env)
        self.file.put(point, SUBMITTED, f"job {job}")
        LOGGER.info("%s: submitted job %s", point.name, job)

    def _submission(self, point: StudyPoint) -> list[str]:
        """Return the options of launch that submit ``point``."""
        return jobs.named([*self.args.launch, *point.launch], point.name)

    def _command(self, point: StudyPoint, options: Sequence[str]) -> list[str]:
        run = ["-m", "wordrun", *point.overrides, f"hydra.run.dir={self._folder(point)}"]
        return [*launch_command(options), sys.executable, *run]

    def _folder(self, point: StudyPoint) -> Path:
        return (self.file.folder / "runs" / point.name).absolute()

    def _output(self, point: StudyPoint) -> Path:
        return self.file.folder / "logs" / f"{point.name}.txt"

    def _record(self, point: StudyPoint, output: Path) -> None:
        """Write the row of a point whose run or job has ended, with everything that it printed in ``output``."""
        state, reason, values = FAILED, "", {}
        try:
            run = load(self._folder(point))
            values = _origin(run)
            if run.state() == "finished":
                values |= self.figures(point, run)
                state = DONE
            else:
                reason = str(run.facts.get("exit_reason", ""))
        except UserError as error:  # there is no run directory, or a figure is missing
            reason = first_line(error) if values else ""
        if state == FAILED and reason in NO_REASON:
            before = self.file.rows.get(point.name, {})
            it = before["reason"] if before.get("state") == SUBMITTED else "it"
            reason = _last_line(output) or f"{it} printed nothing"
        self.file.put(point, state, reason, run_dir=f"runs/{point.name}", **values)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass SIGINT and SIGTERM to the launches within the ``with`` block, and start no more."""

        def stop(number: int, frame: FrameType | None) -> None:
            interrupts.taken()
            self.stopped = True
            for child in self.running:
                processes.send(child.pid, number)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for child in self.running:  # after an error
                processes.send(child.pid, signal.SIGTERM)
            for child in self.running:
                child.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _origin(run: RunRecord) -> dict[str, Any]:
    """Return the columns that say where and with what a run was made."""
    facts, launch = run.facts, run.launches[-1] if run.launches else {}
    world = facts.get("world") or {}
    return {
        "ranks": world.get("size"), "nodes": world.get("nodes"), "started": facts.get("start"),
        "device": facts.get("device_name"), "site": launch.get("site"),
        "commit": facts.get("wordrun_commit", facts.get("git_commit")),
        "versions": "; ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items()),
        "hosts": " ".join(run.hosts[:8]),
    }  # fmt: skip


def _lacked_room(row: Mapping[str, str]) -> bool:
    """Return whether a point failed because the disk was full, or its user's quota was."""
    return row["state"] == FAILED and any(os.strerror(code) in row["reason"] for code in (errno.ENOSPC, errno.EDQUOT))


def _last_line(file: Path) -> str:
    """Return the last line of a run's output that says why it failed; empty: it printed nothing."""
    try:
        lines = lines_without_pages(file.read_text(errors="replace"))
    except OSError:
        lines = []
    return reason_in(lines)
