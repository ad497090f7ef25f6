"""Which run a launch is, and what its files are called."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from wordrun.common.errors import REQUEUE, ConfigError
from wordrun.launch.job import Job
from wordrun.launch.run_identity import choose_run, file_name, records_folder

LAUNCH = str(Path(sys.prefix) / "bin" / "launch")
ALONE = Job(hosts=("box",), cores=(8,), devices=(0,), slots=(1,))
AGAIN = Job(hosts=("n1",), cores=(4,), devices=(0,), slots=(1,), scheduler="slurm", id="17", restarts=2)
COMMAND = ["python", "-m", "wordrun"]


def test_status_75_is_wordruns_own() -> None:
    from wordrun.train import stop

    assert REQUEUE == stop.REQUEUE == os.EX_TEMPFAIL


def test_a_new_run() -> None:
    first, second = (choose_run({}, ALONE, COMMAND, "/nowhere") for _ in range(2))
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", first.run_id)
    assert first.run_id != second.run_id
    assert (first.why, first.resume) == ("", "")


def test_an_exported_name_is_kept() -> None:
    assert choose_run({"WORDRUN_RUN_ID": "mine.2"}, AGAIN, COMMAND, "/nowhere").run_id == "mine.2"
    inside_a_rank = {"WORDRUN_RUN_ID": "mine", "WORDRUN_LAUNCH_ID": "1-aa"}
    assert choose_run(inside_a_rank, ALONE, COMMAND, "/nowhere").run_id != "mine"


@pytest.mark.parametrize("name", ["a/b", "../x", ".", "-n", "a b", "ä"])
def test_a_name_that_cannot_be_part_of_a_file_name(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"WORDRUN_RUN_ID={name}: ")):
        choose_run({"WORDRUN_RUN_ID": name}, ALONE, COMMAND, "/nowhere")


def record(folder: Path, name: str, **facts: object) -> None:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"job": "17", "command": COMMAND, "restarts": 0, "run_id": name, **facts}))


def test_a_requeued_job_resumes_its_runs(tmp_path: Path) -> None:
    def chosen(job: Job = AGAIN, words: list[str] = COMMAND) -> str:
        return choose_run({}, job, words, str(tmp_path)).run_id

    assert re.fullmatch(r"\d{8}-.*", chosen())  # there are no records yet
    record(tmp_path, "b-first-of-this-job")
    record(tmp_path, "c-second-of-this-job")
    record(tmp_path, "a-another-job", job="16")
    record(tmp_path, "a-another-command", command=["true"])
    (tmp_path / "a-dangling.json").symlink_to("nowhere")
    (tmp_path / "a-half.json").write_text('{"job": "1')
    assert chosen() == "b-first-of-this-job"
    assert chosen(words=["true"]) == "a-another-command"
    assert chosen(ALONE).startswith("2")
    record(tmp_path, "b-first-of-this-job-2", run_id="b-first-of-this-job", restarts=2)  # this try has taken it up
    assert chosen() == "c-second-of-this-job"
    record(tmp_path, "c-second-of-this-job-2", run_id="c-second-of-this-job", restarts=2)
    assert chosen().startswith("2")


def test_every_launch_of_a_run_has_files_of_its_own(tmp_path: Path) -> None:
    assert file_name(str(tmp_path), "run") == "run"
    (tmp_path / "run.status").mkdir()  # a killed launch left it
    assert file_name(str(tmp_path), "run") == "run-2"
    record(tmp_path, "run-2")
    assert file_name(str(tmp_path), "run") == "run-3"


def dry(env: Mapping[str, str], *words: str) -> str:
    command = [LAUNCH, "--dry-run", *words, *COMMAND]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **env}).stdout


def test_dry_run_shows_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "export WORDRUN_RUN_ID=mine  # WORDRUN_RUN_ID was exported\n" in dry({"WORDRUN_RUN_ID": "mine"})
    (tmp_path / "outputs" / "launches").mkdir(parents=True)
    record(tmp_path / "outputs" / "launches", "begun")
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_RESTART_COUNT": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    text = dry(slurm)
    reason = "begun by this job before it was requeued (SLURM_RESTART_COUNT=1)"
    assert f"export WORDRUN_RUN_ID=begun  # {reason}\n" in text
    assert "export WORDRUN_RESUME=auto  # requeued: SLURM_RESTART_COUNT=1\n" in text
    assert f"{tmp_path}/outputs/launches/begun-2.json" in text


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["python", "train.py"], False),
        (["python", "/home/u/wordrun/train.py"], False),
        (["python", "-m", "wordrun.test_dist"], False),
        (["python", "-m", "wordrun", "data=sample"], True),
        (["/venv/bin/wordrun"], True),
        (["sh", "-c", "exec python -m wordrun"], True),
        (["numactl", "-m0", "python3", "-u", "-m", "wordrun", "data=sample"], True),
        (["python", "train.py", "--project", "wordrun", "lr=1"], False),
        (["./train", "wordrun"], False),
        (["torchrun", "train.py", "--name", "wordrun"], False),
    ],
)
def test_only_wordruns_commands_leave_records_in_the_working_directory(
    words: list[str], own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, state = f"{tmp_path}/outputs/launches", f"{tmp_path}/state/wordrun/launches"
    assert records_folder(words, {"XDG_STATE_HOME": f"{tmp_path}/state"}) == (here if own else state)
    home = {"HOME": str(tmp_path)}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert records_folder(["x"], home) == records_folder(["x"], {**home, "XDG_STATE_HOME": "not/absolute"})
    assert records_folder(["x"], home) == f"{tmp_path}/.local/state/wordrun/launches"
    os.makedirs(here)
    assert records_folder(words, {}) == here


def test_a_launch_leaves_nothing_in_the_working_directory(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    subprocess.run([LAUNCH, "true"], cwd=folder, env=env, check=True)
    assert list(folder.iterdir()) == []
    (record,) = (tmp_path / "state/wordrun/launches").glob("*.json")
    assert record.stat().st_mode & 0o777 == 0o600
