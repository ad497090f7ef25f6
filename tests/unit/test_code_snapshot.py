"""The copy of the code that a submitted job runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun.commands.train import main
from wordrun.common.errors import ConfigError
from wordrun.launch.code_snapshot import take_snapshot
from wordrun.track.report.facts import environment
from wordrun.track.run_json import RunRecord
from wordrun.train.provenance import commits

if TYPE_CHECKING:
    from conftest import Words


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a committed, a changed, an untracked and an ignored file, and data beside the code."""
    root = tmp_path / "my project"
    for name, text in {
        "train.py": "1",
        "pkg/__init__.py": "",
        "pkg/part.py": "2",
        "pkg/.gitignore": "/built\n",
        "pkg/built": "x",
        ".gitignore": "data/\n",
        "data/big": "bytes",
        "outputs/run.txt": "x",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "train.py", "pkg", ".gitignore")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
    (root / "pkg" / "part.py").write_text("changed")
    (root / "new.py").write_text("new")
    return root


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True)


def test_a_copy_has_the_code_and_links_to_the_rest(project: Path) -> None:
    snapshot = take_snapshot(
        str(project / "outputs" / "jobs" / "j"), str(project / "pkg"), "", {"PYTHONPATH": f"{project}:/x"}
    )
    assert snapshot
    code = project / "outputs" / "jobs" / "j" / "code"
    assert snapshot.cwd == str(code / "pkg")
    assert snapshot.path == (str(code),)
    (project / "train.py").write_text("edited")
    (project / "pkg" / "part.py").unlink()
    (project / "data" / "big").write_text("more")
    found = {name: (code / name).read_text() for name in ("train.py", "pkg/part.py", "new.py", "data/big", "pkg/built")}
    assert found == {"train.py": "1", "pkg/part.py": "changed", "new.py": "new", "data/big": "more", "pkg/built": "x"}
    assert (code / "outputs").resolve() == project / "outputs"
    facts = json.loads(Path(snapshot.record).read_text())
    assert facts == snapshot.facts
    assert (facts["dirty"], facts["untracked"]) == (["pkg/part.py"], ["new.py"])
    assert len(facts["commit"]) == 40


def test_large_files_are_refused_with_their_names(project: Path) -> None:
    weights = project / "weights.bin"
    weights.touch()
    os.truncate(weights, 10_000_001)
    with pytest.raises(ConfigError, match=r"weights.bin is untracked and has .* add it to .gitignore"):
        take_snapshot(str(project / "outputs" / "j"), str(project), "", {})
    git(project, "add", "weights.bin")
    os.truncate(weights, 500_000_001)
    with pytest.raises(ConfigError, match=r"the largest files are weights.bin .*--no-freeze"):
        take_snapshot(str(project / "outputs" / "j"), str(project), "", {})


def test_a_folder_without_git_is_copied_unless_it_is_too_large(project: Path) -> None:
    shutil.rmtree(project / ".git")
    (project / "env" / "lib").mkdir(parents=True)
    (project / "env" / "pyvenv.cfg").touch()
    (project / "env" / "lib" / "torch.py").touch()
    snapshot = take_snapshot(str(project / "outputs" / "j"), str(project), "", {})
    assert snapshot
    code = project / "outputs" / "j" / "code"
    assert (code / "env").is_symlink()
    assert (code / "data").is_symlink()
    assert (code / "pkg" / "part.py").read_text() == "changed"
    assert not (code / "pkg" / "part.py").is_symlink()
    assert snapshot.facts["commit"] is None
    for number in range(20_001):  # links, because they are made faster than files
        os.link(project / "train.py", project / "pkg" / f"{number}.txt")
    assert take_snapshot(str(project / "outputs" / "k"), str(project), "", {}) is None


def test_wordruns_own_checkout_is_copied_with_its_conf(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    for name in ("src/wordrun/__init__.py", "conf/config.yaml", "tests/test_x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("old")
    work = tmp_path / "work"
    work.mkdir()
    snapshot = take_snapshot(str(work / "outputs" / "j"), str(work), str(root), {})
    assert snapshot
    (source,) = snapshot.path
    shutil.rmtree(root / "src")
    (root / "conf" / "config.yaml").write_text("edited")
    assert (Path(source) / "wordrun" / "__init__.py").read_text() == "old"
    assert (Path(source) / "wordrun" / "conf" / "config.yaml").read_text() == "old"
    assert os.path.relpath(source, work) == "outputs/j/wordrun/src"


def test_a_copy_that_cannot_be_written_is_one_error(project: Path) -> None:
    (project / "outputs" / "j").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot copy the code to .*: Not a directory; --no-freeze"):
        take_snapshot(str(project / "outputs" / "j"), str(project), "", {})


def test_a_run_in_the_copy_is_outputs_latest(project: Path, small: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = take_snapshot(str(project / "outputs" / "j"), str(project), "", {})
    assert snapshot
    monkeypatch.chdir(snapshot.cwd)
    monkeypatch.setenv("WORDRUN_CODE", snapshot.record)
    assert main(small("train.max_iters=1", "train.checkpoint_interval=0", "hydra.run.dir=outputs/data/run")) == 0
    assert (project / "outputs" / "latest").resolve() == project / "outputs" / "data" / "run"
    told = json.loads((project / "outputs" / "latest" / "run.json").read_text())
    commit = subprocess.check_output(["git", "-C", str(project), "rev-parse", "HEAD"], text=True).strip()
    assert told["project_commit"] == f"{commit}-dirty"
    assert told["project_repository"] == str(project)
    assert told["wordrun_commit"] != told["project_commit"]
    assert commits() == {name: told[name] for name in ("wordrun_commit", "project_commit", "project_repository")}


def test_a_run_records_the_commit_of_the_repository_around_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "pkg")
    commit = subprocess.check_output(["git", "-C", str(project), "rev-parse", "HEAD"], text=True).strip()
    assert commits()["project_commit"] == f"{commit}-dirty"
    git(project, "checkout", "-q", "--", ".")
    found = commits()
    assert (found["project_commit"], found["project_repository"]) == (commit, str(project))
    assert environment(RunRecord(project, found))["project commit"] == commit
    monkeypatch.chdir(Path(__file__).parent)  # in wordrun's own
    own = commits()
    assert own == {"wordrun_commit": own["wordrun_commit"], "project_commit": None}
    monkeypatch.chdir("/")
    assert commits()["project_commit"] is None


def test_git_is_asked_without_its_lock(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a commit that the user makes at the same time fails."""
    monkeypatch.setenv("GIT_INDEX_FILE", str(project / "another"))  # as in git's hooks
    monkeypatch.chdir(project)
    index = (project / ".git" / "index").read_bytes()
    os.utime(project / "train.py")  # git would note the file's new time in its index
    assert take_snapshot(str(project / "outputs" / "j"), str(project), "", {})
    assert str(commits()["project_commit"]).endswith("-dirty")
    assert (project / ".git" / "index").read_bytes() == index


def test_a_repository_of_another_user_is_named(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.chdir(project)
    assert commits()["project_commit"] is None
    said = f"git does not read {project}, which belongs to another user; to allow that: git config --global --add "
    assert f"{said}safe.directory '{project}'" in caplog.text
    snapshot = take_snapshot(str(project / "outputs" / "j"), str(project), "", {})
    assert snapshot
    assert Path(snapshot.cwd, "train.py").read_text() == "1"
    assert "belongs to another user" in capsys.readouterr().err


def test_a_git_that_does_not_answer_delays_no_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (project / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (project / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}:{os.environ['PATH']}")
    monkeypatch.setattr("wordrun.common.git.LIMIT_S", 0.2)
    monkeypatch.chdir(project)
    assert commits()["project_commit"] is None
    assert "has taken over 0.2 s" in caplog.text
