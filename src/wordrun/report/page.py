"""Fills the template of a report with a run's, or several runs', figures and tables."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wordrun import files
from wordrun.errors import UserError
from wordrun.report import facts
from wordrun.report.figures import COLORS, Canvas, Figure, curve, marks, titles
from wordrun.report.templates import render, text
from wordrun.runs import metrics as run_metrics
from wordrun.runs.metrics import Metrics
from wordrun.runs.record import RunRecord, load
from wordrun.version import __version__

NAME = "report.html"
MOST_CURVES = 40
"""With more runs, a comparison draws the first of them only and says so."""
SPLIT = {
    "dt_data": "waiting for data", "dtf": "forward", "dtb": "backward", "dt_comm": "communication",
    "dt_optimizer": "optimizer", "dt_hooks": "hooks",
}  # fmt: skip
"""The parts of a step's time that are stacked, where a run has them."""
MEMORY = {"memory": "in use", "memory_peak": "peak"}
LOSSES = ("val_loss", "val_perplexity")
"""What evaluations of text always report, in one figure."""
MOST_METRICS = 8
"""Metrics of evaluations besides the loss that a comparison shows."""
NOISY = ("Throughput", "Model FLOPs utilization", "Gradient norm", "Slowest rank behind the median")
"""Figures with a smoothed curve."""
RESULTS = {
    "steps": "steps", "tokens": "tokens", "seconds": "time", "loss": "loss", "val_loss": "val_loss",
    "best_val_loss": "best val_loss",
}  # fmt: skip
"""The entries of run.json that a comparison shows, with the titles of their columns."""


def preload_end() -> None:
    """Begin in another thread, beside the steps, with the imports that the end of a run needs."""

    def load() -> None:
        for module in (
            "matplotlib.figure",
            "matplotlib.backends.backend_agg",
            "matplotlib.backends.backend_svg",
            "jinja2",
        ):
            importlib.import_module(module)

    threading.Thread(target=load, name="report").start()


def write(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return its file; a run that is still running, or has no metrics yet, has one, too.

    Raises:
        UserError: ``run_dir`` contains no run, or the file cannot be written.
    """
    record = load(run_dir)
    metrics = run_metrics.read(record.path)
    table = metrics.training
    notes = []
    state = record.state()
    if not record.facts:
        notes.append("run.json is missing or cannot be read, so that only the metrics are shown.")
    if not table.rows:
        notes.append("The run has not logged a step yet.")
    if state == "running":
        notes.append("The run was still running when this page was written.")
    if metrics.broken > (state in ("running", "died")):  # the last line may be incomplete
        notes.append(f"{metrics.broken} lines of metrics.jsonl cannot be read and are left out.")
    parts, axes = facts.parts_of_run(record), titles([metrics])
    page = _render(
        title=record.path.name, subtitle=_what(record), state=state, notes=notes, summary=_summary(record, metrics),
        axes=axes, panels=_panels(metrics, axes, [part["from_step"] for part in parts[1:]]),
        slowest=facts.slowest(metrics, record.hosts, int((record.facts.get("world") or {}).get("size", 0))),
        samples=facts.samples(record.path), differences=facts.differences(record.path),
        environment=facts.environment(record), parts=parts, failures=facts.failures(record.path),
        profiles=facts.profiles(record.path), tables=facts.tables(record.path), files=facts.files(record.path),
        runs=None,
    )  # fmt: skip
    return _save(page, out or record.path / NAME)


def compare(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a page that compares several runs and return its file.

    Raises:
        UserError: one of ``run_dirs`` contains no run, or the file cannot be written.
    """
    records = [load(path) for path in run_dirs]
    everything = [run_metrics.read(record.path) for record in records]
    options = [facts.options(record.path) for record in records]
    # An option that some runs lack, such as one of another model, follows from the choice that is in the table.
    names = set.intersection(*(set(each) for each in options)) - set(facts.NOT_COMPARED)
    differing = sorted(name for name in names if len({repr(each[name]) for each in options}) > 1)
    metrics = _metrics(records, everything)
    figures = [_results(record, each, metrics) for record, each in zip(records, everything, strict=True)]
    results = [name for name in figures[0] if any(each[name] for each in figures)]
    drawn = [index for index, each in enumerate(everything) if each.training.rows][:MOST_CURVES]
    notes = [f"Only the first {MOST_CURVES} runs are drawn."] if len(drawn) == MOST_CURVES < len(records) else []
    axes = titles(everything)
    page = _render(
        title=f"{len(records)} runs", subtitle=os.path.commonpath([record.path for record in records]), state="",
        notes=notes, summary={}, axes=axes,
        panels=_compared({index: everything[index] for index in drawn}, axes, metrics),
        runs={
            "differing": differing, "results": results,
            "rows": [
                {
                    "name": record.path.name, "path": record.path, "state": record.state(),
                    "color": _color(index) if index in drawn else None,
                    "options": [each[name] for name in differing],
                    "results": [figures[index][name] for name in results],
                    "speed": _speed(everything[index]),
                }
                for index, (record, each) in enumerate(zip(records, options, strict=True))
            ],
        },
    )  # fmt: skip
    return _save(page, out)


def _what(record: RunRecord) -> str:
    chosen = facts.options(record.path)
    names = [str(chosen.get(key, "")) for key in ("data.name", "model.name", "train.backend")]
    return " · ".join(filter(None, names)) or str(record.path)


def _summary(record: RunRecord, metrics: Metrics) -> dict[str, str]:
    table, run = metrics.training, record.facts
    rate, unit = _rate(metrics)
    speed, mfu = table.last(rate), table.last("mfu")
    shown = {
        "steps": run.get("steps") or table.last("step"),
        "tokens": run.get("tokens") or table.last("tokens"),
        "parameters": run.get("parameters"),
        "loss": run.get("loss") or table.last("loss"),
        **{name: metrics.evaluation.last(name) for name in metrics.evaluation.columns if name != "step"},
        f"best {run.get('best_metric', 'val_loss')}": run.get("best_value", run.get("best_val_loss")),
        unit: speed,
        "MFU [%]": mfu,
        "loss spikes": table.last("spikes"),
    }
    texts = {name: _count(value) if name in COUNTS else text(value) for name, value in shown.items() if value}
    return texts | ({"time": facts.duration(run["seconds"])} if run.get("seconds") else {})


COUNTS = ("steps", "tokens", "parameters", "loss spikes")


def _count(value: Any) -> str:
    if not isinstance(value, int | float):
        return ""
    if value < 1e7:
        return f"{value:,.0f}"
    return f"{value / 1e6:,.1f} million" if value < 1e9 else f"{value / 1e9:,.1f} billion"  # what fits into a tile


def _result(name: str, value: Any) -> str:
    if value is None:
        return ""
    return _count(value) if name in COUNTS else facts.duration(value) if name == "seconds" else text(value)


def _results(record: RunRecord, found: Metrics, metrics: Sequence[str]) -> dict[str, str]:
    """Return the cells of a comparison by the titles of their columns: empty where the run has no such value."""
    values = {title: _result(name, record.facts.get(name)) for name, title in RESULTS.items()}
    best = record.best_value() if record.best_metric in metrics else None
    for metric in metrics:
        last = found.evaluation.last(metric)
        values[metric] = "" if last is None else text(last)
        values[f"best {metric}"] = "" if best is None or metric != record.best_metric else text(best)
    return values


def _metrics(records: Sequence[RunRecord], everything: Sequence[Metrics]) -> list[str]:
    """Return what the runs' evaluations report besides the loss, what checkpoints are compared by first."""
    reported = dict.fromkeys(name for each in everything for name in each.evaluation.columns)
    names = dict.fromkeys([*(record.best_metric for record in records), *reported])
    # The perplexity of text says the same as the loss.
    return [name for name in names if name in reported and name not in ("step", *LOSSES)][:MOST_METRICS]


def _speed(metrics: Metrics) -> str:
    name, unit = _rate(metrics)
    value = metrics.training.last(name)
    return "" if value is None else f"{text(value)} {unit}"


def _rate(metrics: Metrics) -> tuple[str, str]:
    return ("tps", "tokens/s") if "tps" in metrics.training else ("sps", "examples/s")


def _panels(metrics: Metrics, axes: dict[str, str], resumed: Sequence[float]) -> list[dict[str, Any]]:
    """Return the figures of a run, each over all axes: its title, and SVG by axis."""
    table, evaluation = metrics.training, metrics.evaluation
    if not table.rows:
        return []
    found: list[dict[str, Any]] = []
    canvas = Canvas()

    def add(title: str, make: Callable[[str], Figure]) -> None:
        figures = {
            axis: replace(make(axis), x_label=title, marks=metrics.along(axis, resumed)) for axis, title in axes.items()
        }
        found.append(_panel(title, figures, canvas))

    def loss(axis: str) -> Figure:
        curves = [curve(metrics, table, "loss", axis, color=COLORS[0], label="training", is_noisy=True)]
        if "val_loss" in evaluation:
            curves.append(curve(metrics, evaluation, "val_loss", axis, color=COLORS[1], label="validation"))
        if metrics.spikes():
            curves.append(marks(metrics, axis, COLORS[3]))
        return Figure(curves, "loss [nats/token]" if "tokens" in table else "loss")

    def lines(names: dict[str, str], y_label: str, source: Any = table, **options: Any) -> Callable[[str], Figure]:
        there = [name for name in names if name in source]
        kind: dict[str, Any] = {"is_noisy": options.pop("is_noisy", False)} if source is table else {}
        styles = {"memory_peak": {"style": "--"}}
        return lambda axis: Figure(
            [
                curve(metrics, source, name, axis, color=_color(i), label=names[name],
                      **kind | styles.get(name, {}))
                for i, name in enumerate(there)
            ],
            y_label, **options,
        )  # fmt: skip

    add("Loss", loss)
    for name in evaluation.columns:
        if name not in ("step", *LOSSES):
            add(name, lines({name: ""}, name, evaluation))
    for kind, labels in _kinds(metrics.other.columns).items():
        add(kind, lines(labels, kind, metrics.other))
    rate, unit = _rate(metrics)
    for title, names, y_label in (
        ("Throughput", {rate: ""}, unit),
        ("Model FLOPs utilization", {"mfu": ""}, "MFU [%]"),
        ("Learning rate", {"lr": ""}, "learning rate"),
        ("Gradient norm", {"grad_norm": ""}, "gradient norm"),
        ("Memory of the rank that uses most", MEMORY, "GiB"),
        ("Slowest rank behind the median", {"slowest_by": ""}, "time per step [s]"),
    ):
        if any(name in table for name in names):
            add(title, lines(names, y_label, from_zero=True, is_noisy=title in NOISY))
    if split := [name for name in SPLIT if name in table]:
        add("Time of a step", lambda axis: Figure([], "time [s]", bands=[
            curve(metrics, table, name, axis, color=COLORS[i], label=SPLIT[name])
            for i, name in enumerate(split)
        ]))  # fmt: skip
    return found


def _panel(title: str, figures: dict[str, Figure], canvas: Canvas) -> dict[str, Any]:
    """Return a panel of the page; its title need not be repeated beside the figure."""
    svgs = {
        axis: canvas.draw(replace(figure, y_label="") if figure.y_label == title.lower() else figure)
        for axis, figure in figures.items()
    }
    return {"title": title, "svg": svgs, "legend": next(iter(figures.values())).legend}


def _kinds(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the labels of hooks' metrics, such as grad_norm/blocks.0, by kind; without labels if they are too many."""
    kinds: dict[str, dict[str, str]] = {}
    for name in names:
        if name != "step":
            kind, _, layer = name.partition("/")
            kinds.setdefault(kind, {})[name] = layer
    return {kind: found if len(found) <= len(COLORS) else dict.fromkeys(found, "") for kind, found in kinds.items()}


def _compared(chosen: dict[int, Metrics], axes: dict[str, str], more: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of several runs over each other; ``more`` are metrics of evaluations besides the loss."""
    panels, canvas = [], Canvas()
    for title, name in (("Validation loss", "val_loss"), ("Training loss", "loss"), *((each, each) for each in more),
                        ("Throughput", "tps"), ("Throughput", "sps"), ("Gradient norm", "grad_norm")):  # fmt: skip
        if name == "sps" and any("tps" in metrics.training for metrics in chosen.values()):
            continue
        figures: dict[str, Figure] = {}
        for axis, x_label in axes.items():
            curves = [
                curve(metrics, table, name, axis, color=_color(index), is_noisy=table is metrics.training)
                for index, metrics in chosen.items()
                for table in (metrics.training, metrics.evaluation)
                if name in table and axis in metrics.training
            ]
            if curves:
                label = {"tps": "tokens/s", "sps": "examples/s"}.get(name, title.lower())
                figures[axis] = Figure(curves, label, x_label, from_zero=name in ("tps", "sps", "grad_norm"))
        if figures:
            panels.append(_panel(title, figures, canvas))
    return panels


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _render(**content: Any) -> str:
    written = f"wordrun {__version__}, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    return render("page", **content, written=written)


def _save(content: str, file: Path) -> Path:
    try:
        files.replace(file, content)
    except OSError as error:
        raise UserError(
            f"cannot write the report to {file}: {error.strerror}; choose another file with out=FILE"
        ) from None
    return file
