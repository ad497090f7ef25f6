"""What all studies share: their options, and the steps from points to a report."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from wordrun.common import log
from wordrun.common.errors import REQUEUE, ConfigError
from wordrun.common.run_dir import drop_ids_of_one_run
from wordrun.launch.options import Options
from wordrun.study import jobs, placements
from wordrun.study.launch_pool import command_of
from wordrun.study.points import DONE, FAILED, IMPOSSIBLE, Point, Points
from wordrun.study.progress import Result
from wordrun.study.runner import Figures, Runner

COMMAND = (sys.executable, "-m", "wordrun")
REMEDY = "or submit the study as one job: launch --submit ... -- wordrun study ... without its own --submit"


def new_parser(study: str, description: str) -> argparse.ArgumentParser:
    """Return a parser to which a study adds its own options; see ``parse_study``."""
    return argparse.ArgumentParser(
        f"wordrun study {study}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_study(
    parser: argparse.ArgumentParser, argv: Sequence[str], chosen: Mapping[str, str], by: str
) -> argparse.Namespace:
    """Add the options of every study and the overrides, and parse ``argv``.

    Args:
        parser: a parser with the study's own options.
        argv: the words after the study's name.
        chosen: maps the keys that the study chooses to its values; empty: the value depends on the study's options.
        by: the options of the study that choose them, for messages.

    Raises:
        ConfigError: an override has one of the keys in ``chosen``, and another value.
    """
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results and the runs")
    parser.add_argument("--retry-failed", action="store_true", help="run failed points again")
    parser.add_argument("--submit", action="store_true", help="submit a job for each point instead of running it here")
    parser.add_argument("--launch", default=[], type=shlex.split, metavar='"..."', help="further options of launch")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of every run")
    args = parser.parse_intermixed_args(argv)
    own = {each: each.lstrip("+").partition("=") for each in args.overrides}
    args.overrides[:] = [each for each, (key, _, value) in own.items() if not _same(value, chosen.get(key, ""))]
    if wrong := [each for each in args.overrides if own[each][0] in chosen]:
        raise ConfigError(f"{', '.join(wrong)}: the study sets this itself ({by})")
    return args


def _same(value: str, chosen: str) -> bool:
    """Return whether the value of an override is the one that the study chooses, such as [jsonl] or False."""
    return bool(chosen) and value.strip(" []'\"").lower() == chosen


def run_study(
    args: argparse.Namespace,
    table: Points,
    points: Callable[[], Iterable[Point]],
    figures: Figures,
    write: Callable[[Path, Sequence[Mapping[str, str]]], Iterable[Path]],
    result: Result = lambda row: "",
) -> int:
    """Run a study and return its exit status: 1 if a point failed, 75 if points are left for the next call.

    Args:
        args: the command line, as parsed by ``parse_study``.
        table: the study's points.csv.
        points: returns the points.
        figures: returns the measured columns of a finished run.
        write: writes the results into a folder, given the rows of the points, and returns their files.
        result: returns what to show of the row of a finished point.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    if "WORDRUN_LAUNCH_ID" in os.environ:
        raise ConfigError("a study starts launch itself: call it without launch, such as in a job script")
    screen = log.start(rank=0)
    drop_ids_of_one_run()
    try:
        with table:
            wanted = list(points())
            status = measure(args, table, wanted, figures, result)
            rows = [table.rows[point.name] for point in wanted if point.name in table.rows]
            if any(row["state"] == DONE for row in rows):
                print(*write(table.folder, rows), sep="\n", flush=True)
    finally:
        screen.close()
    return status


def measure(args: argparse.Namespace, table: Points, points: Sequence[Point], figures: Figures, result: Result) -> int:
    """Run the points, or submit them as jobs; return the exit status of the study. See ``run_study``."""

    def launch(point: Point) -> list[str]:
        return [*args.launch, *point.launch]

    def job(chunk: Sequence[Point]) -> Options:
        return jobs.named(launch(chunk[0]), chunk[0], command_of(COMMAND, chunk[0]))

    runner, status = Runner(table, COMMAND, args.launch, figures, job, args.retry_failed), 0
    if args.submit:
        runner.submit(points, 1, REMEDY)
    else:
        free = placements.nodes(args.launch)
        status = runner.run(points, free, result, lambda point: placements.look(launch(point)).nodes)
    states = {table.state(point) for point in points}
    if states <= {DONE, FAILED, IMPOSSIBLE}:
        return int(FAILED in states)
    print(f"start the study again {'when the jobs have ended' if args.submit else 'to continue'}", flush=True)
    return status if status > 1 else REQUEUE
