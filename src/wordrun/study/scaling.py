"""``wordrun study scaling``: the same training on 1, 2, 4, ... ranks or nodes, under one or several backends."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from wordrun import layouts
from wordrun.composer import compose
from wordrun.errors import ConfigError, UserError, first_line, nearest
from wordrun.launch.request import Ranks
from wordrun.registry import backends
from wordrun.runs import metrics
from wordrun.runs.record import RunRecord
from wordrun.study import page
from wordrun.study.points import IMPOSSIBLE, Points, StudyPoint
from wordrun.study.runner import conduct, look, new_parser, parse_study

DESCRIPTION = """\
Run the same training on 1, 2, 4, ... ranks or nodes and compare the throughput.

  wordrun study scaling --ranks 1,2,4 --out scaling model=gpt2 data=shakespeare
  wordrun study scaling --nodes 1,2,4,8 --weak --backends DDP,FSDP --out weak model=llama3_1b
  wordrun study scaling --nodes 1,2,4 --out jobs --submit --launch="--walltime 0:20:00 --account A" model=gpt2_xl

Each point trains --steps steps to warm up and then --repeats times --steps steps, which are measured: the result is the
median, with the minimum and the maximum as error bars. In a job of several nodes, points run side by side on different
nodes. Call it again to continue: finished points are skipped. DIR receives points.csv, scaling.md, .png and .svg.
"""
BACKENDS = """\
backends to compare, separated by commas, each with options if needed: DDP,FSDP:reshard_after_forward=false,3D:pp=2:tp=2
(default: the one configured)"""
STRONG = """\
the same global batch for all points (default): train.global_batch_size, or else what the largest number of ranks takes
without accumulation"""
VERSION = 3
"""Of the columns."""
COLUMNS = (
    "backend", "scaling", "global_batch", "step_s", "step_s_min", "step_s_max", "tps", "tps_min", "tps_max", "mfu",
    "memory_gib",
)  # fmt: skip
FIXED = {
    "train.eval_interval": "0", "train.checkpoint_interval": "0", "train.sample_interval": "0",
    "train.sample_tokens": "0", "train.report": "false", "tracker": "jsonl",
}  # fmt: skip
"""Options of every run: nothing but steps is measured."""
CHOSEN = ("train.max_iters", "train.log_interval", "train.backend", *FIXED)
"""Options that the study chooses."""


def main(argv: Sequence[str]) -> int:
    """Run the study and return the exit status: 1 if a point failed, 75 if points are left for the next call.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    args = _parse(argv)
    study = page.Study(
        ("wordrun", "study", "scaling", *argv), "ranks" if args.ranks else "nodes", args.steps, args.repeats
    )
    return conduct(
        args, Points(args.out, "scaling", VERSION, COLUMNS),
        lambda file: _points(args, file), lambda point, run: measured(run, args.steps),
        lambda folder, rows: page.write(folder, rows, study), lambda row: f"{float(row['tps']):,.0f} tokens/s",
    )  # fmt: skip


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("scaling", DESCRIPTION)
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--ranks", type=_numbers, metavar="N,...", help="numbers of ranks, such as 1,2,4")
    sizes.add_argument("--nodes", type=_numbers, metavar="N,...", help="numbers of nodes, each with all its devices")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of a measurement (default 20)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="measurements of a point (default 3)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--strong", action="store_true", help=STRONG)
    how.add_argument("--weak", action="store_true", help="the same number of sequences per rank")
    parser.add_argument("--backends", default="", metavar="NAME,...", help=BACKENDS)
    args = parse_study(parser, argv, CHOSEN, "--steps, --repeats, --backends")
    if args.steps < 1 or args.repeats < 1:
        raise ConfigError(f"--steps {args.steps} --repeats {args.repeats} should be at least 1")
    return args


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text} should be positive whole numbers, separated by commas, such as 1,2,4")
    return sorted({int(number) for number in text.split(",")})


def _points(args: argparse.Namespace, file: Points) -> Iterator[StudyPoint]:
    """Yield the points, the smallest first; those that are impossible are recorded as such."""
    base = compose(args.overrides)
    option = "-n" if args.ranks else "-N"
    looks = {size: look(args, (option, str(size)))[1] for size in args.ranks or args.nodes}
    sequences = base.train.global_batch_size
    if args.weak and sequences:
        raise ConfigError(
            f"train.global_batch_size={sequences}: --weak takes model.batch_size and optimizer.gas per rank: omit it"
        )
    per_rank = base.model.batch_size * (base.optimizer.gas or 1)
    labels = [each.strip() for each in args.backends.split(",") if each.strip()] or [base.train.backend]
    choices = {label: _choice(label) for label in labels}
    for size, ranks in looks.items():
        batch = per_rank * ranks.np if args.weak else sequences or per_rank * max(each.np for each in looks.values())
        words = (option, str(size))
        for label in labels:
            name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', label)}-{size}"
            columns = {
                "ranks": ranks.np, "nodes": ranks.nodes, "backend": label, "scaling": "weak" if args.weak else "strong",
                "global_batch": batch,
            }  # fmt: skip
            overrides, problem = [*args.overrides, *choices[label], *_steps(args)], ""
            try:
                overrides += _fit_batch(overrides, batch, ranks)
            except ConfigError as error:
                problem = first_line(error)
            point = StudyPoint(name, tuple(overrides), words, columns)
            file.check([point])
            if problem:
                file.put(point, IMPOSSIBLE, problem)
            yield point


def _steps(args: argparse.Namespace) -> list[str]:
    count = {"train.max_iters": args.steps * (1 + args.repeats), "train.log_interval": args.steps}
    return [f"{name}={value}" for name, value in {**count, **FIXED}.items()]


def _fit_batch(overrides: Sequence[str], sequences: int, ranks: Ranks) -> list[str]:
    """Return the overrides with which the steps of a run have ``sequences`` sequences.

    Raises:
        ConfigError: the run is impossible with these ranks.
    """
    cfg = compose([*overrides, "train.global_batch_size=null"])
    dp = layouts.layout(cfg.backend, ranks.np, ranks.ppn).dp
    if sequences % dp:
        raise ConfigError(f"train.global_batch_size={sequences} cannot be divided by {dp} data-parallel ranks")
    share = sequences // dp
    batch = next(size for size in range(min(cfg.model.batch_size, share), 0, -1) if share % size == 0)
    more = [f"train.global_batch_size={sequences}", f"model.batch_size={batch}", "optimizer.gas=null"]
    compose([*overrides, *more], ranks=ranks.np, per_node=ranks.ppn)
    return more


def _choice(backend: str) -> list[str]:
    """Return the overrides for one of --backends."""
    name, *options = backend.split(":")
    if name not in backends():
        raise ConfigError(
            f"--backends {backend}: {name} is not one of {', '.join(backends())}{nearest(name, backends())}"
        )
    return [f"train.backend={name}", *(f"backend.{option}" for option in options)]


def measured(run: RunRecord, steps: int) -> dict[str, Any]:
    """Return the measured columns of a finished run, whose first ``steps`` steps were for warming up.

    Raises:
        UserError: its metrics are incomplete.
    """
    lines = metrics.read(run.path).training
    if "tps" not in lines:
        raise UserError("its metrics have no tokens per second: the study is for models of text")
    at = [i for i, step in enumerate(lines["step"]) if step > steps]
    if not at:
        raise UserError("it logged no step after the warm-up")
    found: dict[str, Any] = {}
    for name, metric in (("step_s", "dt"), ("tps", "tps")):
        values = [lines[metric][i] for i in at]
        found |= {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return {**found, "mfu": lines.last("mfu"), "memory_gib": lines.last("memory_peak")}
