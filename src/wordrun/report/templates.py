"""The templates of pages, filled by Jinja."""

from __future__ import annotations

from importlib import resources
from typing import Any

from wordrun.report.facts import text


def render(name: str, **content: Any) -> str:
    """Return the page that the template ``name`` makes of ``content``; text in it is escaped."""
    from jinja2 import Environment, StrictUndefined

    template = resources.files("wordrun.report").joinpath(f"{name}.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["value"] = text
    return environment.from_string(template).render(**content)
