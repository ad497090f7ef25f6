"""docs/tasks.md: the project on the page trains, made word for word."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tasks.md").read_text()
FILES = dict(re.findall(r"`([\w.]+)`[^`]*?(?:\([^)]*\)[^`]*?)?:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
(LINE,) = re.findall(r"^launch -n 2 wordrun (model=line.*)$", PAGE, re.MULTILINE)
(WEIGHTED,) = re.findall(r"^launch -n 2 wordrun (model=weighted_line.*)$", PAGE, re.MULTILINE)
(DIGITS,) = re.findall(r"^launch -n 2 python -m wordrun (experiment=.*)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def _page() -> None:
    """Make the page's project in the working directory."""
    assert sorted(FILES) == ["parts.py", "wordrun.yaml"]
    for name, text in FILES.items():
        Path(name).write_text(text)
    for name in ("line.py", "weighted.py"):
        shutil.copy(ROOT / "examples/tasks" / name, ".")
    block = re.findall(r"```python\n(class Line.*?)```", PAGE, re.DOTALL)[0]
    assert all(part in Path("line.py").read_text() for part in block.strip().split("\n\n\n"))
    with Path("parts.py").open("a") as file:
        file.write("".join(re.findall(r"^wordrun.register.*weighted.*\n", PAGE, re.MULTILINE)))


def evaluations(run: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "val_loss" in line]


def test_the_pages_task_learns_on_any_number_of_ranks(ranks: Command) -> None:
    words = [*LINE.split(), "tracker=jsonl", "train.device=cpu", "train.dtype=fp32", "train.global_batch_size=24"]
    for n in (1, 2):
        sizes = [f"model.batch_size={24 // n}", f"hydra.run.dir=run-{n}"]
        done = ranks(n, "-m", "wordrun", *words, *sizes, under="fork")
        assert done.returncode == 0, done.stdout + done.stderr
    last, other = evaluations("run-1")[-1], evaluations("run-2")[-1]
    assert last["step"] == 300
    assert last["val_absolute_error"] < 0.1  # of about 1.8
    assert other == pytest.approx(last, rel=1e-3, abs=1e-6)


def test_the_pages_own_batches_train_on_any_number_of_ranks(ranks: Command) -> None:
    words = [*WEIGHTED.split(), "tracker=jsonl", "train.device=cpu", "train.dtype=fp32", "train.global_batch_size=24"]
    words += ["train.max_iters=80", "train.eval_interval=80", "optimizer.warmup_iters=5"]
    for n in (1, 2):
        sizes = [f"model.batch_size={24 // n}", f"hydra.run.dir=run-{n}"]
        done = ranks(n, "-m", "wordrun", *words, *sizes, under="fork")
        assert done.returncode == 0, done.stdout + done.stderr
    last, other = evaluations("run-1")[-1], evaluations("run-2")[-1]
    assert last["step"] == 80
    assert last["val_loss"] < 0.1  # of about 3
    assert other == pytest.approx(last, rel=1e-3, abs=1e-6)


def test_digits_are_read_as_well_as_the_page_says(ranks: Command) -> None:
    assert "97 % of the validation images" in " ".join(PAGE.split())
    words = [DIGITS, "tracker=jsonl", "train.device=cpu", "train.save_best=false", "hydra.run.dir=digits"]
    done = ranks(2, "-m", "wordrun", *words, under="fork", timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert evaluations("digits")[-1]["step"] == 300
    assert evaluations("digits")[-1]["val_accuracy"] >= 0.97


def test_the_command_line_knows_it(command: Command) -> None:
    shown = command(sys.executable, "-m", "wordrun", "--help", "model=line", "data=points")
    assert "Whether the line can miss the origin." in shown.stdout
    assert "Slope of the line." in shown.stdout
