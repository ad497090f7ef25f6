"""Tables of a study's page."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Return a Markdown table whose first ``text`` columns are text and the others numbers."""
    rule = [*["---"] * text, *["---:"] * (len(heads) - text)]
    cells = [list(heads), rule, *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def figures(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with so many significant digits and thousands separators; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _escaped(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())
