"""The table of the longest sequences that fit, in docs/backends.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from long_sequences import markdown, table

pytestmark = pytest.mark.unit
DOCS = Path(__file__).parents[2] / "docs"


def test_docs_have_the_table_of_the_benchmark() -> None:
    found = markdown(table(24))
    assert found in (DOCS / "backends.md").read_text(), f"put this table into docs/backends.md:\n{found}"
