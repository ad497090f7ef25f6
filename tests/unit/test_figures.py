"""docs/figures/: current, drawn from the plan's numbers and from schedules whose bubbles are those of the formula."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that draws them."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import make_figures

    return make_figures


@pytest.mark.parametrize("name", ["chain", "memory", "pipelines", "messages", "house"])
def test_the_figure_is_current(name: str, figures: ModuleType) -> None:
    drawn = figures.FIGURES[name]()
    assert (ROOT / f"docs/figures/{name}.svg").read_text() == drawn, "run: python docs/make_figures.py"
    width = int(ET.fromstring(drawn).attrib["viewBox"].split()[2])
    rectangles = ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")
    assert all(float(r.attrib["x"]) + float(r.attrib["width"]) <= width for r in rectangles)
    assert "prefers-color-scheme: dark" in drawn


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 3), (2, 2), (4, 8), (4, 3), (3, 16)])
def test_bubbles(schedule: str, ranks: int, micro: int, figures: ModuleType) -> None:
    spans, total = figures.simulate(schedule, ranks, micro)
    assert 1 - 3 * micro / total == pytest.approx((ranks - 1) / (micro + ranks - 1))
    for rank, each in enumerate(spans):
        assert sorted(span[:2] for span in each) == [(kind, i) for kind in "BF" for i in range(micro)]
        assert all(before[3] <= after[2] for before, after in pairwise(each))  # one thing at a time
        assert figures.peak(each) == (micro if schedule == "GPipe" else min(ranks - rank, micro))


def test_networks_do_one_thing_at_a_time(figures: ModuleType) -> None:
    for backend in ("DDP", "FSDP", "TP"):
        for row in ("compute", "network"):
            spans = [span[2:] for span in figures.schedule_of(backend) if span[0] == row]
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
    gathered = {label: end for row, label, _, end in figures.schedule_of("FSDP")[:8] if row == "network"}
    begins = {
        label: begin for row, label, begin, _ in figures.schedule_of("FSDP") if row == "compute" and label[0] == "F"
    }
    assert all(gathered[f"g{i}"] <= begins[f"F{i}"] for i in range(4))
