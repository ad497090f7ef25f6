"""``wordrun new``: the project trains in its folder, and installed in a new environment without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun import new

if TYPE_CHECKING:
    from conftest import Command

ROOT = Path(__file__).parents[2]
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
    done = command("bash", "-n", "job.sh")
    assert (done.returncode, os.access("job.sh", os.X_OK)) == (0, True)


def wheel(source: Path, out: Path) -> Path:
    """Build the wheel of a copy of the files in ``source``."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=120)
    return next(out.glob(f"{source.name}-*.whl"))


def environment(folder: Path, *wheels: Path) -> Path:
    """Make an environment with these wheels, and the libraries of this one; return its bin/."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    # A path file in a folder added by a path file is not read: the editable installation stays out.
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-compile", "--force-reinstall", "--disable-pip-version-check"]
    for each in wheels:
        subprocess.run([*install, *options, f"--prefix={folder}", str(each)], check=True, timeout=120)
    return folder / "bin"


def test_it_trains_in_an_environment_without_the_repository(
    adder: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "wordrun"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "pyproject.toml",
         "README.md", "LICENSE", "src", "conf"], capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    wheels = [wheel(each, tmp_path / "wheels") for each in (source, adder)]
    bin_ = environment(tmp_path / "env", *wheels)
    # mpiexec and its library are this environment's.
    mpi = {"PATH": f"{bin_}:{BIN}:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(BIN.parent / "lib")}
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    where = "import adder, wordrun; print(adder.__file__, wordrun.__file__)"
    assert command(bin_ / "python", "-c", where).stdout.count(str(tmp_path / "env")) == 2
    words = ["model=adder", "data=adder", "tracker=jsonl", "model.block_size=32", *SMALL]
    wordrun = (bin_ / "launch", "-n", "2", "wordrun")
    done = command(*wordrun, *words, "train.max_iters=4", "hydra.run.dir=ddp", **mpi)
    assert done.returncode == 0, done.stdout + done.stderr
    again = ["train.backend=FSDP", "train.resume=ddp", "train.max_iters=8", "hydra.run.dir=fsdp"]
    done = command(*wordrun, *words, *again, **mpi)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(Path("fsdp"))[0] == losses(Path("ddp"))[0]
    assert losses(Path("fsdp"))[1] < losses(Path("ddp"))[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch", "there is a package called 'torch' already"),
        ("json", "there is a package called 'json' already"),
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
