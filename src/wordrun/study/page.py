"""The table, the figure and the page of ``wordrun study scaling``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]


def write(folder: Path, rows: Sequence[Row], args: argparse.Namespace) -> list[Path]:
    """Write scaling.md, and scaling.png and .svg if a point is finished; return their paths."""
    return []
