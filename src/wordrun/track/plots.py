"""plots/loss.png, throughput.png and metrics.png, drawn from metrics.jsonl."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wordrun.runs.metrics import Metrics, Table, read

# The smoothed curve averages over about this share of a run's lines.
SMOOTHING = 0.02
# A curve is drawn with at most about this many points.
POINTS = 1200
# What an evaluation's line contains besides metrics with a panel of their own.
IN_LOSS = ("step", "val_loss", "val_perplexity")


def draw(run_dir: Path, title: str) -> list[Path]:
    """Draw the plots of a run and return their files; a run without a line of metrics has none."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    metrics = read(run_dir)
    training = metrics.training
    if training.last("loss") is None:
        return []
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    names = [name for name in metrics.evaluation.columns if name not in IN_LOSS]
    return [
        _loss(folder / "loss.png", title, metrics),
        _throughput(folder / "throughput.png", title, training),
        *([_metrics(folder / "metrics.png", title, metrics.evaluation, names)] if names else []),
    ]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average of ``values``, without a bias towards its beginning."""
    keep = 1 - 1 / max(1.0, SMOOTHING * len(values))
    mean = weight = 0.0
    smoothed = []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(mean / weight)
    return smoothed


def thin(
    x: Sequence[float], y: Sequence[float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]:
    """Return at most about ``POINTS`` points: x, and the least, greatest and mean finite y around each."""
    size = math.ceil(len(x) / POINTS)
    if size <= 1:
        return x, y, y, y
    parts = []
    for start in range(0, len(x), size):
        values = [value for value in y[start : start + size] if math.isfinite(value)] or [math.nan]
        parts.append((x[min(start + size // 2, len(x) - 1)], min(values), max(values), sum(values) / len(values)))
    xs, low, high, mean = (list(column) for column in zip(*parts, strict=True))
    return xs, low, high, mean


def _figure(height: float) -> Any:
    # Figure rather than pyplot: no global state, no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height), dpi=130)
    # An automatic layout takes almost as long as the drawing.
    figure.subplots_adjust(0.12, 0.5 / height, 0.91, 1 - 0.35 / height, wspace=0.35, hspace=0.35)  # left to top
    return figure


def _label(axes: Any, y_label: str, **labels: str) -> None:
    axes.set(xlabel="step", ylabel=y_label, **labels)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))  # keeps the numbers short
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Any, table: Table, name: str, **options: Any) -> None:
    x, _, _, y = thin(table["step"], table[name])
    axes.plot(x, y, **options)


def _loss(file: Path, title: str, metrics: Metrics) -> Path:
    """Draw the losses, with spikes marked, and the learning rate and the gradient norm below them."""
    figure, training, evaluation = _figure(5.6), metrics.training, metrics.evaluation
    panels = figure.subplot_mosaic([["loss", "loss"], ["lr", "grad_norm"]], height_ratios=[3, 1])
    axes, steps, losses = panels["loss"], training["step"], training["loss"]
    _label(axes, "loss [nats/token]" if "tokens" in training else "loss", title=title)
    x, low, high, _ = thin(steps, losses)
    if len(x) < len(steps):
        axes.fill_between(x, low, high, color="tab:blue", alpha=0.2, lw=0)
    else:
        axes.plot(steps, losses, color="tab:blue", lw=0.8, alpha=0.35)
    finite = [i for i, loss in enumerate(losses) if math.isfinite(loss)]
    x, _, _, y = thin([steps[i] for i in finite], smooth([losses[i] for i in finite]))
    axes.plot(x, y, color="tab:blue", lw=1.5, label="training, smoothed")
    if evaluation.last("val_loss") is not None:
        x, values = evaluation.known("val_loss")
        axes.plot(x, values, "o-", ms=4, color="tab:red", label="validation")
        axes.annotate(f"{values[-1]:.3f}", (x[-1], values[-1]), xytext=(0, 8), textcoords="offset points", ha="center")
    if marked := metrics.spikes():
        axes.plot(
            [steps[i] for i in marked], [losses[i] for i in marked], "v", ms=5, color="tab:orange",
            label="spike since the line before",
        )  # fmt: skip
    axes.legend(frameon=False)
    for name, label in (("lr", "learning rate"), ("grad_norm", "gradient norm")):
        _label(panels[name], label)
        if name in training:
            _curve(panels[name], training, name, lw=1, color="tab:gray")
        panels[name].set_ylim(bottom=0)
    figure.savefig(file)
    return file


def draw_lr_range(
    file: Path, rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float | None
) -> None:
    """Draw a learning-rate range test: the loss over the learning rate, and the suggested one."""
    figure = _figure(4.2)
    axes = figure.subplots()
    _label(axes, "loss")
    axes.set(xlabel="learning rate", xscale="log")
    axes.plot(rates, losses, color="tab:blue", lw=0.8, alpha=0.35)
    axes.plot(rates, smoothed, color="tab:blue", lw=1.5, label="training, smoothed")
    # What follows divergence would hide the rest.
    if math.isfinite(losses[0]):
        lowest = min(loss for loss in losses if math.isfinite(loss))
        axes.set_ylim(lowest - 0.1, losses[0] + 0.5 * (losses[0] - lowest) + 0.1)
    if suggestion is not None:
        axes.axvline(suggestion, color="tab:red", ls=":", label=f"falls fastest at {suggestion:.1e}")
    axes.legend(frameon=False)
    figure.savefig(file)


def _throughput(file: Path, title: str, training: Table) -> Path:
    figure = _figure(4.2)
    axes = figure.subplots()
    rate, unit = ("tps", "tokens/s") if "tps" in training else ("sps", "examples/s")
    _label(axes, f"{unit}, all ranks", title=title)
    if rate in training:
        _curve(axes, training, rate, lw=1, color="tab:green", label=unit)
    axes.set_ylim(bottom=0)
    if training.last("mfu") is not None:
        right = axes.twinx()
        _curve(right, training, "mfu", lw=1, ls=":", color="tab:purple", label="MFU")
        right.set(ylabel="MFU [%]", ylim=(0, None))
    figure.savefig(file)
    return file


def _metrics(file: Path, title: str, evaluation: Table, names: Sequence[str]) -> Path:
    """Draw what evaluations measured besides the loss, a panel for each metric."""
    figure = _figure(2.2 * len(names) + 0.5)
    for number, (name, axes) in enumerate(zip(names, figure.subplots(len(names), squeeze=False)[:, 0], strict=True)):
        _label(axes, name, **({} if number else {"title": title}))
        axes.plot(*evaluation.known(name), "o-", ms=4, color="tab:red")
    figure.savefig(file)
    return file
