"""Writes what ``test_dist --bench`` has measured: bandwidth.json and bandwidth.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TICKS = 8
"""More labels than these would touch each other."""


def save(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write bandwidth.json and bandwidth.png; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bandwidth.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _figure(found, folder / "bandwidth.png")
    return [folder / "bandwidth.json", folder / "bandwidth.png"]


def _figure(found: dict[str, Any], file: Path) -> None:
    """Draw busbw over size, a panel for each kind of group."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(result["group"] for result in found["results"]))
    figure = Figure(figsize=(7, 3.6 * len(kinds)), layout="constrained", dpi=130)
    for kind, axes in zip(kinds, figure.subplots(len(kinds), squeeze=False)[:, 0], strict=True):
        results = [result for result in found["results"] if result["group"] == kind]
        for operation in dict.fromkeys(result["operation"] for result in results):
            of = [result for result in results if result["operation"] == operation]
            axes.plot([r["size"] for r in of], [r["busbw"] for r in of], "o-", ms=3, lw=1.2, label=operation)
        title = f"{kind}: {results[0]['ranks']} ranks, {found['backend']} on {found['device'].partition(':')[0]}"
        axes.set(yscale="log", xlabel="size", ylabel="busbw [GB/s]", title=title)
        axes.set_xscale("log", base=2)
        sizes = sorted({result["size"] for result in results})
        axes.set_xticks(sizes, [_size(size) for size in sizes], rotation=45 if sizes[TICKS:] else 0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file)


def _size(size: int) -> str:
    """Return a size with the unit of which it has a whole number or, if there is none, in bytes."""
    power = next(power for power in (3, 2, 1, 0) if size % 1024**power == 0 and size)
    return f"{size // 1024**power} {('B', 'KB', 'MB', 'GB')[power]}"
