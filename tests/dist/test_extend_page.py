"""docs/extend.md and docs/extend/: a project made word for word from the pages trains with all of its parts."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join(page.read_text() for page in (DOCS / "extend.md", *sorted(DOCS.glob("extend/*.md"))))
FILES = dict(re.findall(r"`((?:mine|conf)/[\w/.]+)`[^`]*?:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
FILES |= {f"mine/{file.name}": file.read_text() for file in DOCS.parent.glob("examples/parts/mine/*.py")}
MOST = {
    "squared": 40,
    "bigram": 40,
    "mlp": 30,
    "sums": 25,
    "alphabet": 30,
    "words": 25,
    "rmsprop": 20,
    "stairs": 12,
    "sure": 10,
    "r2": 10,
    "table": 55,
    "student": 30,
    "csv_file": 20,
    "target": 15,
    "durations": 20,
    "plain": 40,
}
"""Lines, blank ones not counted, that each part may take."""
SMALL = shlex.split("""
    train=smoke data=sums tokenizer=alphabet tracker=csv train.dtype=fp32 train.device=cpu
    train.log_interval=1 train.max_iters=4 train.eval_interval=2 train.global_batch_size=48 model=squared
    model.n_layer=1 optimizer=rmsprop hooks=[target] hooks.target.val_loss=0.1 train.sample_tokens=4
    schedule=stairs optimizer.warmup_iters=0 metrics=[sure] metrics.sure.least=0.1 profiler=durations
""")
MLP = shlex.split("""
    data=digits model=mlp metrics=[sure] tracker=jsonl train.dtype=fp32 train.device=cpu
    train.max_iters=4 train.log_interval=1 train.eval_interval=2 train.eval_iters=2
    train.global_batch_size=16 optimizer.learning_rate=1e-2
""")
BIGRAM = ["model=bigram", "data=sums", "tokenizer=words", "train.sample_tokens=4", *MLP[2:]]
TABLE = ["data=table", "data.path=houses.csv", "data.target=price", "model=regression", "metrics=[r2]", *MLP[3:]]
TABLE += ["train.eval_iters=null", "model.batch_size=4"]
STUDENT = ["model=student", "model.teacher=mlp-ddp", "data=digits", *MLP[3:], "model.batch_size=8"]
SCRIPT = """
import json, sys
from pathlib import Path
import wordrun
from wordrun import dist

with dist.session() as world:
    for words in json.loads(sys.argv[1]):
        with wordrun.Trainer(wordrun.compose(words), world) as trainer:
            print(trainer.train().steps)
        if "metrics=[r2]" in words and world.rank == 0:  # without ranks and batches
            x, y = trainer.task.data.val.tensors
            error = y.double() - wordrun.load(trainer.run.path)(x).detach().double()
            r2 = 1 - error.square().sum() / (y.double() - y.double().mean()).square().sum()
            Path(trainer.run.path, "r2").write_text(f"{len(y)} {r2.item()}")
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Make the page's project in the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    table = re.search(r"```toml\n(\[tool.*?)```", PAGE, re.DOTALL)
    assert table
    (tmp_path / "pyproject.toml").write_text(table[1])
    return tmp_path


def test_the_pages_parts_train_and_resume(ranks: Command, command: Command, page: Path) -> None:
    (page / "script.py").write_text(SCRIPT)
    runs = (
        ["train.backend=DDP", "hydra.run.dir=ddp"],
        ["train.backend=plain", "hydra.run.dir=plain"],
        ["train.backend=plain", "backend.compress=true", "hydra.run.dir=rounded"],
        ["train.backend=FSDP", "train.resume=plain", "train.max_iters=6", "hydra.run.dir=longer"],
        ["train.backend=TP", "hydra.run.dir=tp"],
        ["train.backend=DDP", "train.resume=auto", "hydra.run.dir=ddp", "train.max_iters=9", "hooks.target.val_loss=9"],
    )
    divided = (
        ["train.backend=DDP", "model.batch_size=8", "hydra.run.dir=mlp-ddp"],
        ["train.backend=TP", "model.batch_size=16", "hydra.run.dir=mlp-tp"],
    )
    templates = [
        [*each, f"train.backend={backend}", f"hydra.run.dir={name}-{backend.lower()}"]
        for name, each in (("table", TABLE), ("student", STUDENT))
        for backend in ("DDP", "FSDP")
    ]
    rows = [f"{n},{n * 7 % 31},{5000 + 3 * n - 2 * (n * 7 % 31)}" for n in range(270)]
    (page / "houses.csv").write_text("\n".join(["size,age,price", *rows, "3,,9000", "x,4,9000"]) + "\n")
    plain_text = ["model.batch_size=8", "train.backend=FSDP", "hydra.run.dir=bigram"]
    words = [*([*SMALL, *run] for run in runs), *([*MLP, *run] for run in divided), [*BIGRAM, *plain_text], *templates]
    for tokenizer in SMALL[2], BIGRAM[2]:  # with processes of its own, which forked ranks must not have
        prepared = command("wordrun", "prepare", "data=sums", tokenizer)
        assert prepared.returncode == 0, prepared.stderr
    done = ranks(2, page / "script.py", json.dumps(words), under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    plain = figures(page / "plain")
    assert len(plain) == 10
    for name, close in (("ddp", 1e-5), ("tp", 1e-4), ("rounded", 1e-2)):
        assert figures(page / name)[:10] == pytest.approx(plain, rel=close), name
    assert figures(page / "rounded") != pytest.approx(plain, rel=1e-5)
    assert "the target is reached" in (page / "ddp" / "log.txt").read_text()
    steps = [line.split(",")[0] for line in (page / "longer" / "losses.csv").read_text().splitlines()]
    assert steps == ["1", "2", "2", "3", "4", "4", "5", "6", "6"]  # the tracker gets the lines before the branch, too
    assert "expansion: 4" in (page / "plain" / "config.yaml").read_text()
    rates = [line["lr"] / 1e-3 for line in lines_of(page / "plain") if "lr" in line]
    assert rates == pytest.approx([1, 0.5, 0.25, 0.125])
    assert all(0 < line["val_sure"] <= 1 for line in lines_of(page / "plain") if "val_loss" in line)
    seconds = (page / "plain" / "profile" / "durations.txt").read_text()
    assert re.fullmatch(r"(\d\.\d{6} s\n){4}", seconds)
    saved = json.loads((page / "plain" / "checkpoints" / "step-00000004" / "tokenizer.json").read_text())
    assert saved == {"kind": "alphabet", "characters": "\n+0123456789="}
    assert figures(page / "mlp-tp") == pytest.approx(figures(page / "mlp-ddp"), rel=1e-5)
    assert len(figures(page / "mlp-tp")) == 10
    assert len(figures(page / "bigram")) == 10
    for name in ("table", "student"):
        assert figures(page / f"{name}-fsdp") == pytest.approx(figures(page / f"{name}-ddp"), rel=1e-5), name
    for backend in ("ddp", "fsdp"):
        count, r2 = (page / f"table-{backend}" / "r2").read_text().split()
        assert count == "27"  # not a multiple of two ranks' batches
        assert lines_of(page / f"table-{backend}")[-1]["val_r2"] == pytest.approx(float(r2), abs=1e-6)
    assert "270 of 272 rows of houses.csv" in (page / "table-ddp" / "log.txt").read_text()
    assert (page / "bigram" / "samples.txt").exists()
    assert "using prepared data in " in (page / "bigram" / "log.txt").read_text()
    saved = json.loads((page / "bigram" / "checkpoints" / "step-00000004" / "tokenizer.json").read_text())
    assert {"12", "+", "=", "\n"} < set(saved["characters"])


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: Path) -> list[float]:
    """Return losses and gradient norms of a run."""
    return [line[key] for line in lines_of(run) for key in ("loss", "grad_norm", "val_loss") if key in line]


def test_the_parts_are_short() -> None:
    assert {Path(name).stem for name in FILES} == {*MOST, "parts", "big"}
    counts = {name: sum(map(bool, map(str.strip, FILES[f"mine/{name}.py"].splitlines()))) for name in MOST}
    assert {name: count for name, count in counts.items() if count > MOST[name]} == {}


def test_the_command_line_knows_them(command: Command, page: Path) -> None:
    wordrun = (sys.executable, "-m", "wordrun")
    shown = command(*wordrun, "--help")
    ours = {
        "squared",
        "bigram",
        "big",
        "mlp",
        "sums",
        "alphabet",
        "words",
        "rmsprop",
        "stairs",
        "sure",
        "table",
        "regression",
        "student",
        "r2",
        "durations",
        "csv",
        "target",
    }
    assert {*ours, "plain"} <= set(re.split(r"[\s=]+", shown.stdout))
    shown = command(*wordrun, "--help", "model=big")
    assert "model.expansion=6" in shown.stdout
    assert "Hidden units of an MLP" in shown.stdout
    shown = command(*wordrun, "plan", "model=squared")
    assert shown.stdout.count("no estimate") > 5
    wrong = command(*wordrun, "model=squarde", "data=sums", "data.mots=3", "model.n_layer=-1")
    assert wrong.returncode == 2
    assert "did you mean 'squared'?" in wrong.stderr
    assert "did you mean 'data.most'?" in wrong.stderr
    assert "model.n_layer=-1 should be at least 1" in wrong.stderr
