"""The page that adds a backend: applied to a copy of wordrun as it says, it trains like DDP."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text().partition("## Adding a backend")[2]
BLOCKS = re.findall(r"`(\w+/[\w/.]+)`[^\n]*\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)
SMALL = [
    "train=smoke", "data=sample", "tracker=jsonl", "train.dtype=fp32", "train.device=cpu", "train.log_interval=1",
    "train.max_iters=5", "optimizer.gas=2", "optimizer.learning_rate=2e-3",
]  # fmt: skip
SCRIPT = """
import json, sys
import wordrun
from wordrun import dist
from wordrun.train import run

run.draw = lambda *_: []  # nobody looks at the plots
with dist.session() as world:
    for words in json.loads(sys.argv[1]):
        with wordrun.Trainer(wordrun.compose(words), world) as trainer:
            trainer.train()
"""


def insert(file: Path, before: str, text: str) -> None:
    """Put ``text`` into ``file``, before its only ``before``."""
    content = file.read_text()
    assert content.count(before) == 1
    file.write_text(content.replace(before, text + before))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with a copy of wordrun, changed as the page says."""
    shutil.copytree(ROOT / "src" / "wordrun", tmp_path / "copy" / "wordrun")
    shutil.copytree(ROOT / "conf", tmp_path / "copy" / "wordrun" / "conf")
    package = tmp_path / "copy" / "wordrun"
    for name, text in BLOCKS:
        file = package / name.removeprefix("src/wordrun/")
        if name.endswith("config.py") and text.startswith("@dataclass"):
            insert(file, "PARTS: dict", f"{text}\n\n")
        elif name.endswith("config.py"):
            insert(file, '        "ddp": Part(', text)
        else:
            assert not file.exists()
            file.write_text(text)
    return tmp_path / "copy"


def test_the_pages_backend_trains_like_ddp(ranks: Command, copy: Path) -> None:
    (copy / "script.py").write_text(SCRIPT)
    runs = (["train.backend=DDP"], ["train.backend=plain"], ["train.backend=plain", "backend.compress=true"])
    words = [[*SMALL, *run, f"hydra.run.dir=run_{i}"] for i, run in enumerate(runs)]
    done = ranks(2, copy / "script.py", json.dumps(words), PYTHONPATH=str(copy))
    assert done.returncode == 0, done.stdout + done.stderr
    ddp, plain, rounded = (figures(Path(f"run_{i}")) for i in range(3))
    assert len(ddp) > 10
    assert plain == pytest.approx(ddp, rel=1e-5)
    assert rounded == pytest.approx(ddp, rel=1e-2)
    assert rounded != pytest.approx(ddp, rel=1e-5)


def figures(run: Path) -> list[float]:
    """Return losses and gradient norms of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "val_loss") if key in line]


def test_the_page_has_the_four_parts_in_forty_lines() -> None:
    names = [name for name, _ in BLOCKS]
    assert names == [
        "src/wordrun/config.py", "src/wordrun/config.py", "conf/backend/plain.yaml", "src/wordrun/backend/plain.py",
    ]  # fmt: skip
    assert sum(text.count("\n") for _, text in BLOCKS) <= 40
