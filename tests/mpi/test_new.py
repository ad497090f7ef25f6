"""``wordrun new``: the project trains in its folder; test_package.py installs it in an environment of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun.commands import new

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

BIN = Path(sys.executable).parent
SMALL = ["model.n_layer=1", "model.n_embd=16", "train.eval_iters=2", "train.sample_tokens=4", "train.eval_interval=4"]


@pytest.fixture
def adder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Make a project called adder."""
    assert new.main([str(tmp_path / "adder")]) == 0
    assert "launch -n 2 wordrun experiment=first" in capsys.readouterr().out
    return tmp_path / "adder"


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["val_loss"] for line in lines if "val_loss" in line]


def test_it_trains_in_its_folder(adder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adder)
    words = ["experiment=first", *SMALL, "train.max_iters=8", "hydra.run.dir=run"]
    done = command(BIN / "launch", "-n", "2", "wordrun", *words, PATH=f"{BIN}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(Path("run"))[1] < losses(Path("run"))[0]
    assert "wordrun export run=run form=checkpoint" in done.stdout
    refused = command(BIN / "wordrun", "export", "run=run")
    assert refused.returncode == 2
    assert "has no Hugging Face format" in refused.stderr
    done = command(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pypi.org" not in (readme := Path("README.md").read_text())  # there is no release
    assert "docs/install.md" in readme
    done = command("bash", "-n", "job.sh")
    assert (done.returncode, os.access("job.sh", os.X_OK)) == (0, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch", "there is a package called 'torch' already"),
        ("json", "there is a package called 'json' already"),
        ("class", "'class' is a keyword of Python: choose another name"),
        ("yes", "'yes' is a value for YAML or Hydra"),
        ("llama", "model=llama is one of wordrun's own: choose another name"),
        ("mix", "data=mix is one of wordrun's own"),
        ("3d", "the package would be called '3d': start the name with a letter"),
        ("full", "exists and is not an empty folder"),
    ],
)
def test_a_name_that_does_not_do_is_refused(
    name: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    assert new.main([str(tmp_path / name)]) == 2
    assert expected in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--force"]])
def test_it_takes_one_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert new.main(words) == 2
    assert "wordrun new DIR" in capsys.readouterr().err
