"""The templates of pages, filled by Jinja."""

from __future__ import annotations

from importlib import resources
from typing import Any

WIDTH = 90
"""Characters of a value in a table."""


def render(name: str, **content: Any) -> str:
    """Return the page that the template ``name`` makes of ``content``; text in it is escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["value"] = text
    return environment.get_template(name).render(**content)


def _source(name: str) -> str:
    return resources.files("wordrun.report").joinpath(f"{name}.html.jinja").read_text(encoding="utf-8")


def text(value: Any) -> str:
    """Return an option or a result for a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    shown = repr(value) if value == "" or (isinstance(value, str) and value != value.strip()) else str(value)
    return shown if len(shown) <= WIDTH else f"{shown[: WIDTH - 3]}..."
