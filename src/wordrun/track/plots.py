"""plots/loss.png, throughput.png and metrics.png, drawn from metrics.jsonl."""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from wordrun.track.jsonl import read

# The smoothed curve averages over about this share of a run's lines.
SMOOTHING = 0.02
# What an evaluation's line contains besides metrics with a panel of their own.
IN_LOSS = ("step", "val_loss", "val_perplexity")


def load_beside() -> None:
    """Begin to import what the end of a run needs in another thread, so that drawing need not wait for it."""
    modules = ("matplotlib.figure", "matplotlib.backends.backend_agg", "jinja2")
    threading.Thread(target=lambda: [*map(importlib.import_module, modules)], name="matplotlib").start()


def draw(run_dir: Path, title: str) -> list[Path]:
    """Draw the plots of a run and return their files; a run without a line of metrics has none."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    lines = read(run_dir)
    training = [m for m in lines if "loss" in m and m["loss"] is not None]
    evaluations = [m for m in lines if m.get("val_loss") is not None]
    if not training:
        return []
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    names = [name for name in (evaluations[-1] if evaluations else ()) if name not in IN_LOSS]
    return [
        _loss(folder / "loss.png", title, training, evaluations, spikes(lines)),
        _throughput(folder / "throughput.png", title, training),
        *([_metrics(folder / "metrics.png", title, evaluations, names)] if names else []),
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


def spikes(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Return the steps of the lines in which hooks=[spikes] has counted more loss spikes than in the line before."""
    counted = [(0, 0), *((line["step"], line["spikes"]) for line in lines if "spikes" in line)]
    return [step for (_, before), (step, now) in pairwise(counted) if now > before]


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


def _loss(
    file: Path, title: str, training: list[dict[str, Any]], evaluations: list[dict[str, Any]], marked: Sequence[int]
) -> Path:
    """Draw the losses, with the ``marked`` steps as spikes, and the learning rate and the gradient norm below them."""
    figure = _figure(5.6)
    panels = figure.subplot_mosaic([["loss", "loss"], ["lr", "grad_norm"]], height_ratios=[3, 1])
    axes, steps, losses = panels["loss"], [m["step"] for m in training], [m["loss"] for m in training]
    _label(axes, "loss [nats/token]" if "tokens" in training[0] else "loss", title=title)
    axes.plot(steps, losses, color="tab:blue", lw=0.8, alpha=0.35)
    axes.plot(steps, smooth(losses), color="tab:blue", lw=1.5, label="training, smoothed")
    if evaluations:
        steps_, values = [m["step"] for m in evaluations], [m["val_loss"] for m in evaluations]
        axes.plot(steps_, values, "o-", ms=4, color="tab:red", label="validation")
        axes.annotate(
            f"{values[-1]:.3f}", (steps_[-1], values[-1]), xytext=(0, 8), textcoords="offset points", ha="center"
        )
    if near := [m for m in training if m["step"] in set(marked)]:
        places = [m["step"] for m in near], [m["loss"] for m in near]
        axes.plot(*places, "v", ms=5, color="tab:orange", label="spike since the line before")
    axes.legend(frameon=False)
    for name, label in (("lr", "learning rate"), ("grad_norm", "gradient norm")):
        _label(panels[name], label)
        panels[name].plot(steps, [math.nan if m[name] is None else m[name] for m in training], lw=1, color="tab:gray")
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


def _throughput(file: Path, title: str, training: list[dict[str, Any]]) -> Path:
    figure = _figure(4.2)
    axes = figure.subplots()
    rate, unit = ("tps", "tokens/s") if "tps" in training[0] else ("sps", "examples/s")
    _label(axes, f"{unit}, all ranks", title=title)
    steps = [m["step"] for m in training]
    axes.plot(steps, [m[rate] for m in training], lw=1, color="tab:green", label=unit)
    axes.set_ylim(bottom=0)
    if any(m["mfu"] is not None for m in training):
        right = axes.twinx()
        right.plot(steps, [m["mfu"] for m in training], lw=1, ls=":", color="tab:purple", label="MFU")
        right.set(ylabel="MFU [%]", ylim=(0, None))
    figure.savefig(file)
    return file


def _metrics(file: Path, title: str, evaluations: list[dict[str, Any]], names: Sequence[str]) -> Path:
    """Draw what evaluations measured besides the loss, a panel for each metric."""
    figure = _figure(2.2 * len(names) + 0.5)
    for number, (name, axes) in enumerate(zip(names, figure.subplots(len(names), squeeze=False)[:, 0], strict=True)):
        _label(axes, name, **({} if number else {"title": title}))
        values = [math.nan if m.get(name) is None else m[name] for m in evaluations]
        axes.plot([m["step"] for m in evaluations], values, "o-", ms=4, color="tab:red")
    figure.savefig(file)
    return file
