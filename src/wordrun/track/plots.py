"""Draws metrics as PNG: the plots of one run, and the curves of several runs in comparison."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wordrun.track.metrics_jsonl import Metrics, Table

# The smoothed curve averages over about this share of a run's lines.
SMOOTHING = 0.02
# A curve is drawn with at most about this many points.
POINTS = 1200
# Values in the line of an evaluation that get no panel of their own.
IN_LOSS = ("step", "val_loss", "val_perplexity", "val_bpb")
COLORS = ("#3b82f6", "#f97316", "#22a06b", "#e0484d", "#a26bd6", "#b0764a", "#e273b4", "#8b95a1", "#b3a62c", "#2bb3c0")
"""The colors of runs in a comparison, of the parts of a step, and of layers."""
SPLIT = {
    "dt_data": "waiting for data",
    "dtf": "forward",
    "dtb": "backward",
    "dt_comm": "communication",
    "dt_optimizer": "optimizer",
    "dt_hooks": "hooks",
}
"""The parts of a step's time that are stacked, where a run has them."""
PEAK = 2
"""The axis of stacked times ends at this multiple of their 90th percentile."""


def draw(metrics: Metrics, title: str, resumed: Sequence[float] = ()) -> dict[str, bytes]:
    """Return the plots of a run by the names of their files; empty if it has no metrics yet.

    Args:
        metrics: what the run has logged.
        title: the title of each plot.
        resumed: the steps from which later launches continued the run, to be marked in the plot of the loss.
    """
    if metrics.training.last("loss") is None:
        return {}
    plots = {"loss.png": _loss(title, metrics, resumed), "throughput.png": _throughput(title, metrics.training)}
    panels = _panels(metrics)
    return plots | ({"metrics.png": _metrics(title, panels)} if panels else {})


def overlay(name: str, runs: Mapping[int, Metrics]) -> bytes | None:
    """Return a plot of one metric with a curve for each run, colored by its number; None: no run has the metric."""
    figure = _figure(3.6)
    axes = figure.subplots()
    _label(axes, name)
    for number, metrics in runs.items():
        color = color_of(number)
        if name in metrics.training:
            _noisy(axes, metrics.training["step"], metrics.training[name], color)
        if name in metrics.evaluation:
            axes.plot(*metrics.evaluation.known(name), "o-", ms=3, color=color)
    return _png(figure) if axes.lines else None


def color_of(number: int) -> str:
    """Return the color of a run in a comparison."""
    return COLORS[number % len(COLORS)]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average of ``values``, bias-corrected as in Adam."""
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

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    figure = Figure(figsize=(7, height), dpi=130)
    # An automatic layout takes almost as long as the drawing.
    figure.subplots_adjust(0.12, 0.5 / height, 0.91, 1 - 0.35 / height, wspace=0.35, hspace=0.35)  # left to top
    return figure


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _label(axes: Any, y_label: str, **labels: str) -> None:
    axes.set(xlabel="step", ylabel=y_label, **labels)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))  # keeps the numbers short
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Any, table: Table, name: str, **options: Any) -> None:
    x, _, _, y = thin(table["step"], table[name])
    axes.plot(x, y, **options)


def _noisy(axes: Any, steps: Sequence[float], values: Sequence[float], color: str, label: str = "") -> None:
    """Draw the smoothed curve over the faint original one; of a long curve, over the band between its extremes."""
    x, low, high, _ = thin(steps, values)
    if len(x) < len(steps):
        axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    else:
        axes.plot(steps, values, color=color, lw=0.8, alpha=0.35)
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    x, _, _, y = thin([steps[i] for i in finite], smooth([values[i] for i in finite]))
    axes.plot(x, y, color=color, lw=1.5, label=label)


def _loss(title: str, metrics: Metrics, resumed: Sequence[float]) -> bytes:
    """Draw the losses, with spikes and later launches marked, and the learning rate and the gradient norm below."""
    figure, training, evaluation = _figure(5.6), metrics.training, metrics.evaluation
    panels = figure.subplot_mosaic([["loss", "loss"], ["lr", "grad_norm"]], height_ratios=[3, 1])
    axes, steps, losses = panels["loss"], training["step"], training["loss"]
    _label(axes, "loss [nats/token]" if "tokens" in training else "loss", title=title)
    _noisy(axes, steps, losses, "tab:blue", "training, smoothed")
    if evaluation.last("val_loss") is not None:
        x, values = evaluation.known("val_loss")
        bpb = evaluation.last("val_bpb")
        label = "validation" if bpb is None else f"validation, {bpb:.3f} bits per byte"
        axes.plot(x, values, "o-", ms=4, color="tab:red", label=label)
        axes.annotate(f"{values[-1]:.3f}", (x[-1], values[-1]), xytext=(0, 8), textcoords="offset points", ha="center")
    if marked := metrics.spikes():
        x, values = [steps[i] for i in marked], [losses[i] for i in marked]
        axes.plot(x, values, "v", ms=5, color="tab:orange", label="spike since the line before")
    for number, step in enumerate(resumed):
        axes.axvline(step, color="black", ls=":", lw=0.8, alpha=0.6, label="_" if number else "resumed")
    axes.legend(frameon=False)
    for name, label in (("lr", "learning rate"), ("grad_norm", "gradient norm")):
        _label(panels[name], label)
        if name in training:
            _curve(panels[name], training, name, lw=1, color="tab:gray")
        panels[name].set_ylim(bottom=0)
    return _png(figure)


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


def _throughput(title: str, training: Table) -> bytes:
    """Draw the throughput and the MFU, and below them the parts of a step's time and the memory."""
    figure = _figure(5.6)
    panels = figure.subplot_mosaic([["rate", "rate"], ["time", "memory"]], height_ratios=[5, 4])
    axes = panels["rate"]
    rate, unit = ("tps", "tokens/s") if "tps" in training else ("sps", "examples/s")
    _label(axes, f"{unit}, all ranks", title=title)
    if rate in training:
        _curve(axes, training, rate, lw=1, color="tab:green", label=unit)
    axes.set_ylim(bottom=0)
    if training.last("mfu") is not None:
        right = axes.twinx()
        _curve(right, training, "mfu", lw=1, ls=":", color="tab:purple", label="MFU")
        right.set(ylabel="MFU [%]", ylim=(0, None))
    _step_time(panels["time"], training)
    _label(panels["memory"], "memory, highest rank [GiB]")
    for name, label, style in (("memory", "in use", "-"), ("memory_peak", "peak", "--")):
        if name in training:
            _curve(panels["memory"], training, name, lw=1, ls=style, color="tab:brown", label=label)
            panels["memory"].legend(frameon=False, fontsize=7)
    panels["memory"].set_ylim(bottom=0)
    return _png(figure)


def _step_time(axes: Any, training: Table) -> None:
    """Stack the parts of a step's time; rare, much higher peaks are cut off."""
    _label(axes, "time of a step [s]")
    labels = {name: label for name, label in SPLIT.items() if name in training}
    if not labels:
        return
    x = thin(training["step"], training["step"])[0]
    means = (thin(training["step"], training[name])[3] for name in labels)
    heights = [[y if math.isfinite(y) else 0.0 for y in each] for each in means]
    axes.stackplot(x, heights, labels=labels.values(), colors=COLORS, alpha=0.75, lw=0)
    totals = sorted(map(sum, zip(*heights, strict=True)))
    shown = min(totals[-1], PEAK * totals[9 * len(totals) // 10])
    axes.set_ylim(0, 1.12 * shown or None)
    title = "higher peaks cut off" if shown < totals[-1] else ""
    axes.legend(loc="upper right", fontsize=6, title=title, title_fontsize=6)


def _panels(metrics: Metrics) -> list[tuple[str, Table, list[str]]]:
    """Return the panels of metrics.png: one for each metric of evaluations, and for each kind of layers' metrics."""
    kinds: dict[str, list[str]] = {}
    for name in metrics.other.columns:
        if name != "step":
            kinds.setdefault(name.partition("/")[0], []).append(name)
    measured = [name for name in metrics.evaluation.columns if name not in IN_LOSS]
    return [(name, metrics.evaluation, [name]) for name in measured] + [
        (kind, metrics.other, names) for kind, names in kinds.items()
    ]


def _metrics(title: str, panels: Sequence[tuple[str, Table, list[str]]]) -> bytes:
    figure = _figure(2.2 * len(panels) + 0.5)
    all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for number, ((label, table, names), axes) in enumerate(zip(panels, all_axes, strict=True)):
        _label(axes, label, **({} if number else {"title": title}))
        if len(names) == 1:
            axes.plot(*table.known(names[0]), "o-", ms=4, color="tab:red")
            continue
        for layer, name in enumerate(names):
            axes.plot(*table.known(name), lw=1, color=color_of(layer), label=name.partition("/")[2])
        if len(names) <= len(COLORS):
            axes.legend(frameon=False, fontsize=7, ncols=2)
    return _png(figure)
