"""docs/status.md: made of docs/status.yaml, whose evidence exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
STATUS = yaml.safe_load((ROOT / "docs/status.yaml").read_text())


def cells() -> Iterator[tuple[str, str, str]]:
    for rows in STATUS["groups"].values():
        for feature, row in rows.items():
            if not isinstance(row, str):
                yield from ((feature, column, cell) for column, cell in row.items())


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    from make_status import render

    assert (ROOT / "docs/status.md").read_text() == render(), "run: python docs/make_reference.py"


def test_each_evidence_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    from make_status import evidence

    wrong = []
    for feature, column, cell in cells():
        file, name = ROOT / evidence(cell), cell.partition("::")[2]
        found = file.is_file() and re.search(rf"^def {name}\(" if name else "", file.read_text(), re.MULTILINE)
        # What has run on a GPU or at a site, a results file records.
        tier = {"cpu": "unit dist mpi", "scheduler": "slurm pbs"}.get(column, "")
        dated = re.match(r"\d{4}-\d\d-\d\d_", cell) if not name else cell.partition("/")[0] in tier.split()
        if not (found and dated and column in STATUS["columns"]):
            wrong.append((feature, column, cell))
    assert len(list(cells())) > 60
    assert wrong == []
