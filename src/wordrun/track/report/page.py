"""Fills the template of report.html with the plots and tables of one run or several."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from wordrun.common import files
from wordrun.common.errors import UserError
from wordrun.common.version import __version__
from wordrun.track import metrics_jsonl as run_metrics
from wordrun.track.metrics_jsonl import Metrics
from wordrun.track.plots import color_of, draw, overlay
from wordrun.track.report import facts
from wordrun.track.run_json import RunRecord, load, state_of

NAME = "report.html"
WIDTH = 90
"""Maximum number of characters of a value in a table."""
MOST_CURVES = 40
"""Maximum number of runs that a comparison draws; with more, a note tells that only the first are drawn."""
LOSSES = ("val_loss", "val_perplexity")
"""Metrics that every evaluation of text reports; they share a figure."""
MOST_METRICS = 8
"""Metrics of evaluations besides the loss that a comparison shows."""
RESULTS = {
    "steps": "steps",
    "tokens": "tokens",
    "seconds": "time",
    "loss": "loss",
    "val_loss": "val_loss",
    "best_val_loss": "best val_loss",
}
"""The entries of run.json that a comparison shows, with the titles of their columns."""
COUNTS = ("steps", "tokens", "parameters", "loss spikes")


def write(run_dir: Path, out: Path | None = None, *, plots: bool = False) -> list[Path]:
    """Write the report of a run, which may be still running or have no metrics yet, and return the files written.

    Args:
        run_dir: the run's directory.
        out: the page's file; None: report.html in the run's directory.
        plots: also write the plots to files of their own, in plots/ in the run's directory.

    Raises:
        UserError: ``run_dir`` contains no run, or the page cannot be written.
    """
    record = load(run_dir)
    metrics = run_metrics.read(record.path)
    state = state_of(record)
    notes = []
    if not record.facts:
        notes.append("run.json is missing or cannot be read, so that only the metrics are shown.")
    if not metrics.training.rows:
        notes.append("The run has not logged a step yet.")
    if state == "running":
        notes.append("The run was still running when this page was written.")
    if metrics.broken > (state in ("running", "died")):  # the last line may be incomplete
        notes.append(f"{metrics.broken} lines of metrics.jsonl cannot be read and are left out.")
    launches, what = facts.starts_of_run(record), _what(record)
    drawn = draw(metrics, f"{what}  ({record.path.name})", [launch["from_step"] for launch in launches[1:]])
    pictures = []
    for name, png in drawn.items() if plots else ():
        pictures.append(record.path / "plots" / name)
        pictures[-1].parent.mkdir(exist_ok=True)
        pictures[-1].write_bytes(png)
    page = _render(
        title=record.path.name,
        subtitle=what,
        state=state,
        notes=notes,
        summary=_summary(record, metrics),
        plots=drawn,
        slowest=facts.slowest(metrics, record.hosts, int((record.facts.get("world") or {}).get("size", 0))),
        samples=facts.samples(record.path),
        differences=facts.differences(record.path),
        environment=facts.environment(record),
        parts=launches,
        failures=facts.failures(record.path),
        tables=facts.tables(record.path),
        files=facts.files(record.path),
        runs=None,
    )
    return [*pictures, _save(page, out or record.path / NAME)]


def compare(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a page that compares several runs and return its file.

    Raises:
        UserError: one of ``run_dirs`` contains no run, or the file cannot be written.
    """
    records = [load(path) for path in run_dirs]
    everything = [run_metrics.read(record.path) for record in records]
    options = [facts.options(record.path) for record in records]
    # Options that some runs lack are left out: they belong to a part, such as a model, whose choice is in the table.
    names = set.intersection(*(set(each) for each in options)) - set(facts.NOT_COMPARED)
    differing = sorted(name for name in names if len({repr(each[name]) for each in options}) > 1)
    metrics = _metrics(records, everything)
    figures = [_results(record, each, metrics) for record, each in zip(records, everything, strict=True)]
    results = [name for name in figures[0] if any(each[name] for each in figures)]
    drawn = [index for index, each in enumerate(everything) if each.training.rows][:MOST_CURVES]
    notes = [f"Only the first {MOST_CURVES} runs are drawn."] if len(drawn) == MOST_CURVES < len(records) else []
    page = _render(
        title=f"{len(records)} runs",
        subtitle=os.path.commonpath([record.path for record in records]),
        state="",
        notes=notes,
        summary={},
        plots=_compared({index: everything[index] for index in drawn}, metrics),
        runs={
            "differing": differing,
            "results": results,
            "rows": [
                {
                    "name": record.path.name,
                    "path": record.path,
                    "state": state_of(record),
                    "color": color_of(index) if index in drawn else None,
                    "options": [each[name] for name in differing],
                    "results": [figures[index][name] for name in results],
                    "speed": _speed(everything[index]),
                }
                for index, (record, each) in enumerate(zip(records, options, strict=True))
            ],
        },
    )
    return _save(page, out)


def _compared(runs: Mapping[int, Metrics], metrics: Sequence[str]) -> dict[str, bytes]:
    """Return plots that overlay the curves of several runs; ``metrics`` are those of evaluations besides the loss."""
    rate = "tps" if any("tps" in each.training for each in runs.values()) else "sps"
    names = ("val_loss", "loss", *metrics, rate, "grad_norm")
    return {name: png for name in names if (png := overlay(name, runs))}


def _what(record: RunRecord) -> str:
    chosen = facts.options(record.path)
    data, model, backend = (str(chosen.get(key, "?")) for key in ("data.name", "model.name", "train.backend"))
    return f"{data}: {model}, {backend}" if chosen else str(record.path)


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
    """Return the metrics of the runs' evaluations besides the loss, starting with each run's train.best_metric."""
    reported = dict.fromkeys(name for each in everything for name in each.evaluation.columns)
    names = dict.fromkeys([*(record.best_metric for record in records), *reported])
    # Perplexity is the exponential of the loss, and tells nothing new.
    return [name for name in names if name in reported and name not in ("step", *LOSSES)][:MOST_METRICS]


def _speed(metrics: Metrics) -> str:
    name, unit = _rate(metrics)
    value = metrics.training.last(name)
    return "" if value is None else f"{text(value)} {unit}"


def _rate(metrics: Metrics) -> tuple[str, str]:
    return ("tps", "tokens/s") if "tps" in metrics.training else ("sps", "examples/s")


def text(value: Any) -> str:
    """Return an option or a result for a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    shown = repr(value) if value == "" or (isinstance(value, str) and value != value.strip()) else str(value)
    return shown if len(shown) <= WIDTH else f"{shown[: WIDTH - 3]}..."


def _render(**content: Any) -> str:
    """Return the page; text in it is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(value=text, base64=lambda png: base64.b64encode(png).decode())
    template = resources.files("wordrun.track.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    written = f"wordrun {__version__}, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    return environment.from_string(template).render(**content, written=written)


def _save(content: str, file: Path) -> Path:
    try:
        files.replace(file, content)
    except OSError as error:
        raise UserError(
            f"cannot write the report to {file}: {error.strerror}; choose another file with out=FILE"
        ) from None
    return file
