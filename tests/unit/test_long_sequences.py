"""The table of the longest sequences that fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from long_sequences import markdown, table

pytestmark = pytest.mark.unit
FILE = Path(__file__).parents[2] / "benchmarks/results/2026-11-26_long_sequences.md"


def test_the_results_have_the_table_of_the_benchmark() -> None:
    found = markdown(table(24))
    assert found in FILE.read_text(), f"put this table into {FILE}:\n{found}"
    docs = (FILE.parents[2] / "docs/backends.md").read_text()
    assert {"50,176", "216,064"} <= set(re.findall(r"[\d,]{6,}", docs)) & set(re.findall(r"[\d,]{6,}", found))
