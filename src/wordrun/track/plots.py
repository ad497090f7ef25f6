"""plots/loss.png and plots/throughput.png, drawn from metrics.jsonl."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from wordrun.track.jsonl import read


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
    return [
        _loss(folder / "loss.png", title, training, evaluations),
        _throughput(folder / "throughput.png", title, training),
    ]


def _axes(title: str, y_label: str) -> Any:
    # Figure rather than pyplot: no global state, no display.
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 4.2), layout="constrained", dpi=130).subplots()
    axes.set(title=title, xlabel="step", ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _loss(file: Path, title: str, training: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> Path:
    axes = _axes(title, "loss [nats/token]")
    axes.plot([m["step"] for m in training], [m["loss"] for m in training], lw=1, alpha=0.7, label="training")
    if evaluations:
        steps, losses = [m["step"] for m in evaluations], [m["val_loss"] for m in evaluations]
        axes.plot(steps, losses, "o-", ms=4, color="tab:red", label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 8), textcoords="offset points", ha="center"
        )
    axes.legend(frameon=False)
    axes.figure.savefig(file)
    return file


def _throughput(file: Path, title: str, training: list[dict[str, Any]]) -> Path:
    axes = _axes(title, "tokens/s, all ranks")
    steps = [m["step"] for m in training]
    axes.plot(steps, [m["tps"] for m in training], lw=1, color="tab:green", label="tokens/s")
    axes.set_ylim(bottom=0)
    if any(m["mfu"] is not None for m in training):
        right = axes.twinx()
        right.plot(steps, [m["mfu"] for m in training], lw=1, ls=":", color="tab:purple", label="MFU")
        right.set(ylabel="MFU [%]", ylim=(0, None))
    axes.figure.savefig(file)
    return file
