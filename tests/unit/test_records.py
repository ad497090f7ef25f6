"""A run is its checkpoints: its other files may be missing, broken, or not even files."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import wordrun
from wordrun import cli
from wordrun.checkpoint import folder as folders
from wordrun.common.errors import UserError
from wordrun.track import metrics_jsonl as metrics, run_json as records
from wordrun.track.run_json import state_of
from wordrun.train.hooks.base import Hook
from wordrun.train.trainer import Trainer

Words = Callable[..., list[str]]
Say = pytest.CaptureFixture[str]
SAVING = tuple(
    shlex.split("""
    model=nano
    train.log_interval=1 train.eval_interval=4 train.checkpoint_interval=3 train.save_best=false
    train.keep_checkpoints=9 train.sample_interval=3 train.sample_tokens=4 model.dropout=0.2
""")
)
RECORDS = ("run.json", "config.yaml", "metrics.jsonl", "log.txt", "samples.txt")


class Act(Hook):
    """A hook that does something after a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def after_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            trainer.checkpoints.wait()
            self.action()


def train(words: list[str], folder: Path, *hooks: Hook) -> Trainer:
    with Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"]), hooks=hooks) as trainer:
        trainer.train()
    return trainer


def losses(folder: Path) -> dict[int, float]:
    """Return the training losses of a run by step, as its metrics.jsonl has them."""
    table = metrics.read(folder).training
    return {int(step): loss for step, loss in zip(table["step"], table["loss"], strict=True)}


@pytest.fixture(scope="module")
def whole(small: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps that nobody has stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small(*SAVING, "train.max_iters=9"), folder)
    return folder


@pytest.fixture(scope="module")
def stopped(small: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run after 6 steps, whose checkpoints are of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(small(*SAVING, "train.max_iters=6"), folder)
    return folder


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run that a test may spoil."""
    shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.fixture
def goes_on(whole: Path, small: Words, capfd: Say) -> Callable[[Path], str]:
    """Resume a run, compare it with the one that was not stopped, and return what was said before its first step."""

    def resume(folder: Path) -> str:
        capfd.readouterr()
        trainer = train(small(*SAVING, "train.max_iters=9", "train.resume=auto"), folder)
        said = capfd.readouterr()
        assert trainer.start.step == 6
        assert [loss for step, loss in losses(folder).items() if step > 6] == list(losses(whole).values())[6:]
        assert "Traceback" not in said.out + said.err
        record = records.load(folder)
        assert state_of(record) == record.facts["exit_reason"] == "finished"
        assert (record.facts["steps"], record.facts["resumed_from"]["step"]) == (9, 6)
        return said.out.partition("step 7/")[0]

    return resume


def spoil(file: Path, how: str) -> None:
    """Put something else in the place of a file."""
    content = file.read_bytes()
    file.unlink()
    if how == "folder":
        (file / "inside").mkdir(parents=True)
    elif how == "dangling":
        file.symlink_to("/nowhere/else")
    elif how == "pipe":
        os.mkfifo(file)
    elif how != "missing":
        file.write_bytes(
            {
                "empty": b"",
                "list": b"[]",
                "NULs": bytes(4096),
                "UTF-16": content.decode().encode("utf-16"),
                "deep": b"[" * 100_000,
                "types": b'{"world": 3, "earlier": {"a": 1}, "exit_reason": [], "steps": "x"}',
                "byte": content[:40] + b"\xff" + content[41:],
            }[how]
        )


HOWS = shlex.split("missing empty list NULs UTF-16 deep types byte folder dangling pipe")


@pytest.mark.parametrize("how", HOWS)
def test_a_run_goes_on_whatever_its_record_says(how: str, copy: Path, goes_on: Callable[[Path], str]) -> None:
    started = records.read(copy)["start"]
    spoil(copy / "run.json", how)
    for name in RECORDS[1:]:  # with all others gone, the checkpoint has to know
        (copy / name).unlink()
    said = goes_on(copy)
    earlier = records.read(copy)["earlier"]
    assert [part["start"] for part in earlier] == [started]
    problem = {
        "missing": "run.json is missing",
        **dict.fromkeys(("folder", "dangling", "pipe"), "run.json is no file, and is now run.json.broken"),
    }.get(how, "run.json cannot be read, and is now run.json.broken")
    # UTF-16 can be read.
    assert said.count(problem) == (how != "UTF-16")
    assert said.count("its record of earlier launches is restored from the checkpoint of step 6") == (how != "UTF-16")
    assert [part["steps"] for part in earlier] == [6]
    kept = {"missing": [], "UTF-16": []}.get(how, ["run.json.broken"])
    assert [file.name for file in copy.glob("run.json.*")] == kept


@pytest.mark.parametrize("how", HOWS)
def test_a_run_goes_on_whatever_its_other_records_are(how: str, copy: Path, goes_on: Callable[[Path], str]) -> None:
    for name in RECORDS[1:]:
        spoil(copy / name, how)
    (copy / "plots").write_text("")
    (copy / "failures").symlink_to("/nowhere")
    (copy / "wandb").write_text("")
    said = goes_on(copy)
    assert "plots is no folder, and is now plots.broken" in said
    for name in RECORDS[1:] if how == "folder" else ():
        assert said.count(f"{name} is no file, and is now {name}.broken") == 1
    if how == "byte":
        assert "1 of its 8 lines cannot be read" in said
    else:
        assert "lacks 8 of the 8 lines up to step 6: the longest gap is from step 0 to 6" in said
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line)["step"], int) for line in lines)
    assert "step 9/9" in (copy / "log.txt").read_text(errors="replace")
    assert records.load(copy).facts["steps"] == 9


def test_bad_bytes_stay_where_they_are_and_only_their_lines_are_lost(
    copy: Path, whole: Path, small: Words, goes_on: Callable[[Path], str], capfd: Say
) -> None:
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    spoilt = [*lines[:2], lines[2].replace(b"loss", b"l\xffss"), *lines[3:], b'{"step": 7, "lo']
    (copy / "metrics.jsonl").write_bytes(b"".join(spoilt))
    for name in ("log.txt", "samples.txt"):
        with (copy / name).open("ab") as file:
            file.write(b"caf\xe9\n")
    said = goes_on(copy)
    assert f"metrics.jsonl: 1 of its {len(spoilt)} lines cannot be read and are skipped; the original is" in said
    assert "lacks 1 of the 8 lines up to step 6: the longest gap is from step 2 to 4" in said
    assert (copy / "metrics.jsonl.broken").read_bytes() == b"".join(spoilt)
    expected = losses(whole)
    del expected[3]
    assert losses(copy) == expected
    assert b"caf\xe9\n" in (copy / "log.txt").read_bytes()
    assert b"caf\xe9\n" in (copy / "samples.txt").read_bytes()
    train(small(*SAVING, "train.max_iters=10", "train.resume=auto"), copy)
    assert "lacks" not in capfd.readouterr().out  # it was said once


def test_a_metrics_file_that_was_cut_is_one_line(copy: Path, goes_on: Callable[[Path], str]) -> None:
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:9])
    said = goes_on(copy)
    assert "metrics.jsonl lacks 5 of the 8 lines up to step 6: the longest gap is from step 3 to 6" in said
    assert not (copy / "metrics.jsonl.broken").exists()


def test_without_checkpoints_a_broken_record_starts_over(small: Words, copy: Path, whole: Path, capfd: Say) -> None:
    shutil.rmtree(copy / "checkpoints")
    (copy / "run.json").write_text("{")
    train(small(*SAVING, "train.max_iters=9", "train.resume=auto"), copy)
    assert losses(copy) == losses(whole)
    said = capfd.readouterr().out
    assert "its record of earlier launches is lost" in said
    assert "starting over at step 0, because no checkpoint is on disk" in said


def test_a_new_run_is_not_written_over_checkpoints(small: Words, copy: Path) -> None:
    for name in RECORDS:
        (copy / name).unlink()
    with pytest.raises(UserError, match=r"already contains a run: resume it with train.resume=auto"):
        train(small(*SAVING), copy)
    assert not (copy / "metrics.jsonl").exists()
    assert [each.step for each in folders.all_in(copy)] == [3, 6]


def test_a_branch_goes_on_without_its_record(small: Words, stopped: Path, tmp_path: Path) -> None:
    words = small(*SAVING, "train.max_iters=9", f"train.resume={stopped}/checkpoints/step-00000003")
    train(small(*SAVING, "train.max_iters=6", words[-1]), tmp_path / "branch")
    (tmp_path / "branch" / "run.json").unlink()
    assert train(words, tmp_path / "branch").start.step == 6


@pytest.mark.parametrize(
    ("how", "names"),
    [*((how, (*RECORDS, "launch.json")) for how in HOWS), ("folder", RECORDS[1:]), ("byte", RECORDS[1:])],
)
def test_commands_read_what_is_left_of_a_run(how: str, names: Sequence[str], copy: Path, capfd: Say) -> None:
    for name in names:
        (copy / name).touch()
        spoil(copy / name, how)
    (copy / "failures").mkdir(exist_ok=True)
    (copy / "failures" / "rank-0.txt").mkdir()
    (copy / "profile").write_text("")
    for words in (["ls", str(copy.parent)], ["tail", str(copy)], ["report", str(copy)]):
        with pytest.raises(SystemExit) as ended:
            sys.exit(cli.main(words))
        said = capfd.readouterr()
        assert (ended.value.code or 0) == 0, (words, said)
        assert "Traceback" not in said.out + said.err
    status = cli.main(["generate", f"run={copy}", "prompt=The", "length=4"])
    assert not status
    assert "The" in capfd.readouterr().out


# After a checkpoint is complete


def test_links_that_are_folders_are_set_aside(small: Words, copy: Path, whole: Path, capfd: Say) -> None:
    place = copy / "checkpoints"
    for name in ("latest", "best"):  # as scp -r leaves them
        (place / name).unlink(missing_ok=True)
        shutil.copytree(place / "step-00000003", place / name)
    words = small(*SAVING, "train.max_iters=9", "train.resume=auto", "train.keep_checkpoints=1")
    train(words, copy)
    said = capfd.readouterr().out
    assert said.count("checkpoints/latest was a folder instead of a link, and is now latest.broken") == 1
    assert (place / "latest").resolve().name == "step-00000009"
    assert losses(copy) == losses(whole)
    assert [each.step for each in folders.all_in(copy)] == [3, 9]  # the best one is kept
    assert [each.step for each in folders.choose(copy, "best")] == [3]


def test_a_checkpoint_that_cannot_be_removed_fails_no_save(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Say
) -> None:
    place = tmp_path / "run" / "checkpoints"
    held, rename = place / "step-00000003", Path.rename

    def refused(path: Path, target: Any) -> Path:
        if path == held:
            raise OSError(16, "Device or resource busy", str(path))
        return rename(path, target)

    def hold() -> None:
        if subprocess.run(["mount", "--bind", held, held], capture_output=True).returncode:  # only root may
            monkeypatch.setattr(Path, "rename", refused)

    try:
        words = small(*SAVING, "train.max_iters=9", "train.keep_checkpoints=1", f"hydra.run.dir={tmp_path}/run")
        with Trainer(wordrun.compose(words), hooks=[Act(4, hold)]) as trainer:
            trainer.train()
    finally:
        subprocess.run(["umount", held], capture_output=True)
    said = capfd.readouterr()
    assert said.out.count(f"is complete, but: cannot remove {held}: Device or resource busy") == 1
    assert trainer.checkpoints.written == 9
    assert [each.step for each in folders.all_in(tmp_path / "run")] == [3, 9]


def test_strange_things_among_the_checkpoints_fail_no_save(copy: Path, goes_on: Callable[[Path], str]) -> None:
    place = copy / "checkpoints"
    (place / "step-00000009").write_text("a file in the place of a checkpoint")
    (place / ".step-00000009.new").write_text("")
    (place / "notes").mkdir()
    newest = place / "step-00000009"
    newest.unlink()
    newest.symlink_to("/nowhere")
    newest.rename(place / "step-00000002")
    goes_on(copy)
    assert folders.all_in(copy)[-1].check()["step"] == 9


# The run directory


@pytest.mark.parametrize(("how", "interval"), [("removed", 3), ("removed", 0), ("moved", 3), ("made again", 0)])
def test_a_run_whose_directory_is_removed_says_so(
    how: str, interval: int, small: Words, tmp_path: Path, capfd: Say
) -> None:
    folder = tmp_path / "run"

    def remove() -> None:
        if how == "moved":
            folder.rename(tmp_path / "moved")
        else:
            shutil.rmtree(folder)
        if how == "made again":
            folder.mkdir()

    with pytest.raises(
        UserError, match=f"the directory {folder} of this run was removed, moved or became unreachable"
    ) as found:
        train(small(*SAVING, "train.max_iters=9", f"train.checkpoint_interval={interval}"), folder, Act(4, remove))
    assert found.value.exit_status == 1
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    assert {file.name for file in folder.glob("*")} <= ({"failures"} if how == "made again" else set())


def test_following_a_run_that_vanishes_ends(tmp_path: Path, capfd: Say) -> None:
    assert cli.main(["tail", str(tmp_path / "none")])
    assert "does not exist" in capfd.readouterr().err
