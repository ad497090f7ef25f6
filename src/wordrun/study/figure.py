"""Figures of studies, in the same style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wordrun.errors import UserError


def panels(titles: Sequence[str], height: float = 3.4, *, same_y: bool = True) -> tuple[Any, list[Any]]:
    """Return a matplotlib figure with a panel for each of ``titles``, at most three in a row, and its axes.

    With ``same_y``, they have the same y axis."""
    from matplotlib.figure import Figure

    columns = 2 if len(titles) == 4 else min(3, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(4.2 * columns, height * rows), layout="constrained", dpi=150)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=same_y).flat)
    for each, title in zip(axes, titles, strict=False):
        each.set_title(title, fontsize=10)
        each.grid(alpha=0.3)
    for empty in axes[len(titles) :]:
        empty.set_visible(False)
    return figure, axes[: len(titles)]


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write ``figure`` as PNG and SVG; return their paths.

    Raises:
        UserError: they cannot be written.
    """
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    try:
        for path in paths:
            figure.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; start the study again to draw it") from None
    return paths
