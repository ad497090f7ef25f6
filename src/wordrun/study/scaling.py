"""``wordrun study scaling``: the same training on 1, 2, 4, ... ranks or nodes, under one or several backends."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.suggestions import nearest
from wordrun.config.compose import compose
from wordrun.config.registry import backends
from wordrun.launch.request import Ranks
from wordrun.study import report
from wordrun.study.base import new_parser, parse_study, run_study
from wordrun.study.placements import look
from wordrun.study.points import DONE, Point, Points, number
from wordrun.study.report import Report, Row
from wordrun.track import metrics_jsonl
from wordrun.track.run_json import RunRecord

DESCRIPTION = """\
Run the same training on 1, 2, 4, ... ranks or nodes and compare the throughput.

  wordrun study scaling --ranks 1,2,4 --out scaling model=gpt2 data=shakespeare
  wordrun study scaling --nodes 1,2,4,8 --weak --backends DDP,FSDP --out weak model=llama3_1b
  wordrun study scaling --nodes 1,2,4 --out jobs --submit --launch="--walltime 0:20:00 --account A" model=gpt2_xl

Each point trains --steps steps to warm up and then --repeats times --steps steps, which are measured: the result is the
median, with the minimum and the maximum as error bars. In a job of several nodes, points run side by side on different
nodes. Run the command again to continue: finished points are skipped. DIR receives points.csv, report.md, scaling.csv
and scaling.png.
"""
BACKENDS = """\
backends to compare, separated by commas, each with options if needed: DDP,FSDP:reshard_after_forward=false,3D:pp=2:tp=2
(default: the one configured)"""
STRONG = """\
the same global batch for all points (default): train.global_batch_size, or else what the largest number of ranks takes
without accumulation"""
VERSION = 3
"""Version of the columns of points.csv."""
COLUMNS = (
    "backend",
    "scaling",
    "global_batch",
    "step_s",
    "step_s_min",
    "step_s_max",
    "tps",
    "tps_min",
    "tps_max",
    "mfu",
    "memory_gib",
)
FIXED = {
    "train.eval_interval": "0",
    "train.checkpoint_interval": "0",
    "train.sample_interval": "0",
    "train.sample_tokens": "0",
    "train.report": "false",
    "tracker": "jsonl",
}
"""Options of every run: nothing but steps is measured."""
CHOSEN = {"train.max_iters": "", "train.log_interval": "", "train.backend": "", **FIXED}
"""Options that the study chooses, and their values; empty: by the study's options."""
HEADS = {
    "tps": "tokens/s",
    "tps_min": "min",
    "tps_max": "max",
    "speed_up": "speed-up",
    "efficiency": "efficiency",
    "step_ms": "step [ms]",
    "mfu": "MFU [%]",
    "memory_gib": "memory [GiB]",
    "node_hours": "node hours per 10^9 tokens",
}
NOTES = """\
Tokens/s are the median of {measurements} of {steps} steps each, after {steps} steps to warm up; min and max are
the slowest and the fastest measurement. Speed-up and efficiency refer to the fastest backend on {least}. MFU is the
share of the devices' peak floating-point operations (- where the peak is unknown). Memory is the highest peak of any
rank, on CPUs of the whole process. Node hours count whole nodes."""


def main(argv: Sequence[str]) -> int:
    """Run the study and return the exit status: 1 if a point failed, 75 if points are left for the next call.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    args = _parse(argv)
    return run_study(
        args,
        Points(args.out, "scaling", VERSION, COLUMNS),
        lambda: _points(args),
        lambda run: measured(run, args.steps),
        lambda folder, rows: write(folder, rows, args, ["wordrun", "study", "scaling", *argv]),
        lambda row: f"{float(row['tps']):,.0f} tokens/s",
    )


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


def _points(args: argparse.Namespace) -> Iterator[Point]:
    """Yield the points, the smallest first."""
    base = compose(args.overrides)
    option = "-n" if args.ranks else "-N"
    sizes = args.ranks or args.nodes
    looks = {size: look([*args.launch, option, str(size)], submit=args.submit) for size in sizes}
    sequences = base.train.global_batch_size
    if args.weak and sequences:
        raise ConfigError(
            f"train.global_batch_size={sequences}: --weak takes model.batch_size and train.accumulation per rank: "
            "omit it"
        )
    per_rank = base.model.batch_size * (base.train.accumulation or 1)
    labels = [each.strip() for each in args.backends.split(",") if each.strip()] or [base.train.backend]
    choices = {label: _choice(label) for label in labels}
    for size, ranks in looks.items():
        batch = per_rank * ranks.np if args.weak else sequences or per_rank * max(each.np for each in looks.values())
        words = (option, str(size))
        for label in labels:
            name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', label)}-{size}"
            columns = {
                "ranks": ranks.np,
                "nodes": ranks.nodes,
                "backend": label,
                "scaling": "weak" if args.weak else "strong",
                "global_batch": batch,
            }
            overrides, problem = [*args.overrides, *choices[label], *_steps(args)], ""
            try:
                overrides += _fit_batch(overrides, batch, ranks)
            except ConfigError as error:
                problem = first_line(error)
            yield Point(name, args.out / "runs" / name, tuple(overrides), words, columns, problem=problem)


def _steps(args: argparse.Namespace) -> list[str]:
    count = {"train.max_iters": args.steps * (1 + args.repeats), "train.log_interval": args.steps}
    return [f"{name}={value}" for name, value in {**count, **FIXED}.items()]


def _fit_batch(overrides: Sequence[str], sequences: int, ranks: Ranks) -> list[str]:
    """Return the overrides that give each step of a run ``sequences`` sequences.

    Raises:
        ConfigError: the run is impossible with these ranks.
    """
    cfg = compose([*overrides, "train.global_batch_size=null"])
    dp = cfg.backend.layout(ranks.np, ranks.ppn).dp
    if sequences % dp:
        raise ConfigError(f"train.global_batch_size={sequences} cannot be divided by {dp} data-parallel ranks")
    share = sequences // dp
    batch = next(size for size in range(min(cfg.model.batch_size, share), 0, -1) if share % size == 0)
    more = [
        f"train.global_batch_size={sequences}",
        f"model.batch_size={batch}",
        "train.accumulation=null",
        "optimizer.gas=null",
    ]
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
    lines = metrics_jsonl.read(run.path).training
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


def write(folder: Path, rows: Sequence[Row], args: argparse.Namespace, command: Sequence[str]) -> list[Path]:
    """Write report.md, scaling.csv and scaling.png; return their paths.

    Args:
        folder: the study's folder.
        rows: those of its points, of which one at least is done.
        args: the study's options.
        command: its command line.

    Raises:
        UserError: a file cannot be written.
    """
    unit, done = "ranks" if args.ranks else "nodes", [row for row in rows if row["state"] == DONE]
    base = min(done, key=lambda row: (int(row[unit]), -float(row["tps"])))
    table = [{"backend": row["backend"], unit: int(row[unit]), **_results(row, base, unit)} for row in done]
    kind = done[0]["scaling"]
    batch = "the same global batch" if kind == "strong" else "the same number of sequences per rank"
    sizes = ", ".join(dict.fromkeys(row[unit] for row in done))
    text = [f"# {kind.capitalize()} scaling on {sizes} {unit}", "", f"Every point trains with {batch}.", ""]
    for most in {each["backend"]: each for each in table}.values():
        if most[unit] != int(base[unit]):
            many = f"{most['tps']:,.0f} tokens/s on {most[unit]} {unit}, {most['speed_up']:.2f} times as many as on"
            text.append(f"- {most['backend']}: {many} {base[unit]} (efficiency {most['efficiency']:.0%})")
    least = f"{base[unit]} {unit.removesuffix('s') if base[unit] == '1' else unit}"
    measurements = f"{args.repeats} measurement{'s' * (args.repeats > 1)}"
    notes = [NOTES.format(steps=args.steps, measurements=measurements, least=least)]
    heads = {"backend": "backend", unit: unit, **HEADS}
    figures = {"scaling": _figure(table, unit, base)}
    return Report("scaling", text, heads, table, figures, notes).write(folder, rows, command)


def _results(row: Row, base: Row, unit: str) -> dict[str, Any]:
    """Return a row of the table, by the columns in HEADS; ``base`` is the point to which the speed-up refers."""
    tps, step = float(row["tps"]), number(row, "step_s") or 0.0
    speed_up = tps / float(base["tps"])
    return {
        "tps": tps,
        "tps_min": number(row, "tps_min"),
        "tps_max": number(row, "tps_max"),
        "speed_up": speed_up,
        "efficiency": speed_up * int(base[unit]) / int(row[unit]),
        "step_ms": 1000 * step,
        "mfu": number(row, "mfu"),
        "memory_gib": number(row, "memory_gib"),
        "node_hours": int(row["nodes"]) * 1e9 / tps / 3600,
    }


def _figure(table: Sequence[dict[str, Any]], unit: str, base: Row) -> Any:
    """Draw tokens/s over ranks or nodes, a panel for each backend, with the ideal line."""
    from matplotlib.ticker import EngFormatter, LogLocator

    by_backend: dict[str, list[dict[str, Any]]] = {}
    for each in table:
        by_backend.setdefault(each["backend"], []).append(each)
    drawing, panels = report.panels(list(by_backend))
    all_sizes, per_size = sorted({each[unit] for each in table}), float(base["tps"]) / int(base[unit])
    for axes, rows in zip(panels, by_backend.values(), strict=True):
        sizes, middle = [each[unit] for each in rows], [each["tps"] for each in rows]
        bars = [[each["tps"] - each["tps_min"] for each in rows], [each["tps_max"] - each["tps"] for each in rows]]
        axes.plot(all_sizes, [per_size * size for size in all_sizes], "--", color="0.5", lw=1, label="ideal")
        axes.errorbar(sizes, middle, bars, fmt="o-", ms=4, lw=1.4, capsize=3, label="measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        report.mark(axes.xaxis, all_sizes)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.yaxis.set_minor_locator(LogLocator(subs=()))
        axes.set(xlabel=unit, ylabel="tokens/s")
        axes.label_outer()
    panels[0].legend(frameon=False, fontsize=8)
    return drawing
