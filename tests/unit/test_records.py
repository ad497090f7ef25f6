"""A run is its checkpoints: its records may be missing or broken, which is said in a line and stops nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wordrun
from wordrun import cli
from wordrun.checkpoint import folder as folders
from wordrun.common.errors import UserError
from wordrun.track.metrics_jsonl import parsed
from wordrun.train.hooks.base import Hook

Words = Callable[..., list[str]]
SAVING = (
    "train.max_iters=6", "train.log_interval=1", "train.eval_interval=2", "train.checkpoint_interval=2",
    "train.keep_checkpoints=9", "model.dropout=0.2", "optimizer.lr_decay_iters=6",
)  # fmt: skip


def train(words: list[str], folder: Path, *hooks: Hook) -> int:
    """Train, and return the steps."""
    with wordrun.Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"]), hooks=hooks) as trainer:
        trainer.train()
    return trainer.step


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return the training losses in metrics.jsonl, and skip lines that are broken."""
    lines = map(parsed, (folder / "metrics.jsonl").read_bytes().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line and "loss" in line]


@pytest.fixture(scope="module")
def whole(small: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small(*SAVING), folder)
    return folder


@pytest.fixture(scope="module")
def half(small: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of the same run."""
    folder = tmp_path_factory.mktemp("half") / "run"
    train(small(*SAVING, "train.max_iters=4"), folder)
    return folder


def remove(file: Path) -> None:
    file.unlink()


def bytes_of(content: bytes) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(content)


def be_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def dangle(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def as_utf16(file: Path) -> None:
    file.write_bytes(file.read_text().encode("utf-16"))


def spoil(file: Path) -> None:
    """Put a bad byte into the third line."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], b"\xff" + lines[2], *lines[3:]]))


def cut(file: Path) -> None:
    """Keep the first two lines."""
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))


BROKEN = {
    "run.json gone": ("run.json", remove, r"run\.json is missing: .* is from the checkpoint of step 4"),
    "run.json cut": ("run.json", bytes_of(b"{"), r"run\.json cannot be read, and is now run\.json\.broken"),
    "run.json a list": ("run.json", bytes_of(b"[]"), r"run\.json cannot be read, and is now run\.json\.broken"),
    "run.json NULs": ("run.json", bytes_of(b"\0" * 99), r"run\.json cannot be read, and is now run\.json\.broken"),
    "run.json empty": ("run.json", bytes_of(b""), r"run\.json cannot be read, and is now run\.json\.broken"),
    "run.json deep": ("run.json", bytes_of(b"[" * 99999), r"run\.json cannot be read, and is now run\.json\.broken"),
    "run.json a folder": ("run.json", be_a_folder, r"run\.json is no file, and is now run\.json\.broken"),
    "run.json dangling": ("run.json", dangle, r"run\.json is no file, and is now run\.json\.broken"),
    "run.json UTF-16": ("run.json", as_utf16, ""),
    "config.yaml NULs": ("config.yaml", bytes_of(b"\0\xff"), ""),
    "config.yaml a folder": ("config.yaml", be_a_folder, r"config\.yaml is no file, and is now config\.yaml\.broken"),
    "metrics a bad byte": ("metrics.jsonl", spoil, r"1 of its \d+ lines cannot be read .* original is .*jsonl\.broken"),
    "metrics cut": ("metrics.jsonl", cut, r"metrics\.jsonl lacks \d+ of the \d+ lines up to step 4: the longest gap"),
    "metrics gone": ("metrics.jsonl", remove, r"lacks \d+ of the \d+ lines up to step 4: .* from step 0 to 4"),
    "metrics a folder": ("metrics.jsonl", be_a_folder, r"metrics\.jsonl is no file, and is now metrics\.jsonl\.broken"),
    "log a bad byte": ("log.txt", spoil, ""),
    "log a folder": ("log.txt", be_a_folder, r"log\.txt is no file, and is now log\.txt\.broken"),
    "samples bytes": ("samples.txt", bytes_of(b"\xff\xfe--- step"), ""),
    "samples a folder": ("samples.txt", be_a_folder, r"samples\.txt is no file, and is now samples\.txt\.broken"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_record_stops_no_resume(
    case: str, whole: Path, half: Path, small: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, damage, says = BROKEN[case]
    run = tmp_path / "run"
    shutil.copytree(half, run, symlinks=True)
    if not (run / name).exists():
        (run / name).touch()
    damage(run / name)
    assert train(small(*SAVING, "train.resume=auto"), run) == 6
    text = (run / "log.txt").read_text(errors="replace")
    assert "resumed from" in text
    assert "Traceback" not in text
    if says:
        assert len([line for line in text.splitlines() if re.search(says, line)]) == 1, text
    assert losses(run)[-2:] == losses(whole)[-2:]
    assert set(losses(run)) <= set(losses(whole))
    record = json.loads((run / "run.json").read_text())
    assert (record["steps"], record["resumed_from"]["step"], record["exit_reason"]) == (6, 4, "finished")
    assert [part["steps"] for part in record["earlier"]] == [4]
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize("case", BROKEN)
def test_broken_records_are_shown_as_far_as_they_go(
    case: str, half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, damage, _ = BROKEN[case]
    run = tmp_path / "run"
    shutil.copytree(half, run, symlinks=True)
    if not (run / name).exists():
        (run / name).touch()
    damage(run / name)
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert cli.main(["report", f"run={run}"]) == 0
    assert cli.main(["generate", f"run={run}", "prompt=The", "length=3", "device=cpu"]) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err


def test_a_new_run_does_not_begin_over_checkpoints(half: Path, small: Words, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(half, run, symlinks=True)
    for name in ("run.json", "metrics.jsonl"):
        (run / name).unlink()
    with pytest.raises(UserError, match=r"already contains a run: resume it with train\.resume=auto"):
        train(small(*SAVING), run)
    assert not (run / "metrics.jsonl").exists()


class Act(Hook):
    """Does something after a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def after_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            trainer.checkpoints.join(None)
            self.action()


def test_a_complete_checkpoint_is_saved_whatever_happens_to_its_links(small: Words, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def copied_without_links() -> None:
        for name in ("latest", "best"):
            link = run / "checkpoints" / name
            target = link.resolve()
            link.unlink()
            shutil.copytree(target, link)

    assert train(small(*SAVING), run, Act(3, copied_without_links)) == 6
    text = (run / "log.txt").read_text()
    assert text.count("latest was a folder instead of a link, and is now latest.broken") == 1
    assert os.readlink(run / "checkpoints" / "latest") == "step-00000006"
    assert [each.step for each in folders.all_in(run)] == [2, 4, 6]
    assert json.loads((run / "run.json").read_text())["exit_reason"] == "finished"


def test_a_refused_removal_of_old_checkpoints_is_said_and_fails_nothing(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tmp_path / "run", Path.rename

    def refused(path: Path, target: Any) -> Path:
        if path.name == "step-00000002":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    words = ["train.keep_checkpoints=1", "train.save_best=false"]
    assert train(small(*SAVING, *words), run) == 6
    text = (run / "log.txt").read_text()
    assert len(re.findall(r"step 4 is complete, but: cannot remove \S+step-00000002: Permission denied", text)) == 1
    assert [each.step for each in folders.all_in(run)] == [2, 6]
    assert json.loads((run / "run.json").read_text())["exit_reason"] == "finished"


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_run_whose_directory_is_gone_says_so(how: str, small: Words, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def lose() -> None:
        if how == "removed":
            shutil.rmtree(run)
        else:
            run.rename(tmp_path / "elsewhere")

    with pytest.raises(UserError, match=rf"the directory {run} of this run was removed, moved or cut off \(No such"):
        train(small(*SAVING), run, Act(3, lose))
    assert not run.exists()
