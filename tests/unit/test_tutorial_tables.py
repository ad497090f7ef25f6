"""docs/tutorials/coming_from.md: what the tables say to type here exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wordrun.config.compose import compose
from wordrun.launch.parser import parse

PAGE = (Path(__file__).parents[2] / "docs/tutorials/coming_from.md").read_text()
CELLS = [row.split("|")[2] for row in re.findall(r"^\| (?!-).*\|$", PAGE, re.MULTILINE)]
SPANS = [span for cell in CELLS for span in re.findall(r"`([^`]+)`", cell)]
OVERRIDES = [span for span in SPANS if re.match(r"[a-z_.]+=", span) and not re.search(r"[A-Z]{4}|\.\.\.", span)]
LAUNCHES = [span for span in SPANS if span.startswith("launch -")]


def test_options_exist() -> None:
    assert len(OVERRIDES) > 10
    for words in OVERRIDES:
        if not words.endswith("="):
            compose([*words.split(), "train.device=cpu"] if "init_from" not in words else words.split()[1:])


@pytest.mark.parametrize("line", LAUNCHES)
def test_launch_understands(line: str) -> None:
    parse(line.replace(" ...", "").split()[1:])
