"""What a killed launch has left behind is removed by the next one, and nothing else is."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wordrun.common import owner, shm
from wordrun.launch import leftovers
from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.schedulers import SCHEDULERS

ME = owner.this_process()


@pytest.fixture
def dead() -> dict[str, Any]:
    """Return a process that has ended."""
    code = "import json; from wordrun.common import owner; print(json.dumps(owner.this_process()))"
    return dict(json.loads(subprocess.check_output([sys.executable, "-c", code])))


def test_a_process_is_known_by_more_than_its_number(dead: dict[str, Any]) -> None:
    assert owner.is_dead(dead) is True
    assert owner.is_dead(ME) is False
    assert owner.is_dead({**ME, "start": "1"}) is True  # another process had this number
    assert owner.is_dead({**ME, "boot": "before"}) is True
    for elsewhere in ({**dead, "host": "another"}, {**dead, "pids": "pid:[1]"}, {}, {"host": ME["host"], "pid": None}):
        assert owner.is_dead(elsewhere) is None


@pytest.mark.parametrize("name", ["wordrun-launch-{}-0a1b2c3d4e5f", ".wordrun-launch-{}-0a1b2c3d4e5f"])
def test_folders_of_dead_launches_are_removed(
    name: str, dead: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    kept = []
    for number, who in enumerate(({**dead, "host": "another"}, ME, None, {**ME, "pids": "pid:[1]"}, dead)):
        folder = tmp_path / name.format(number)
        folder.mkdir()
        os.mkfifo(folder / "0.out")
        if who is not None:
            (folder / leftovers.OWNER).write_text(json.dumps(who))
        kept.append(folder.name)
    others = tmp_path / "wordrun-launch-notes"
    others.mkdir()
    (tmp_path / name.format(9)).symlink_to(others)
    assert leftovers.clear(str(tmp_path)) == [os.getpid()]
    assert leftovers.clear(str(tmp_path), this=str(tmp_path / kept[1])) == []
    assert {path.name for path in tmp_path.iterdir()} == {*kept[:-1], others.name, name.format(9)}


@pytest.mark.parametrize(("scheduler", "what"), [("pbs", "both use the cores"), ("slurm", "srun waits while")])
def test_another_launch_of_the_same_job_is_named(scheduler: str, what: str) -> None:
    found = SCHEDULERS[scheduler]
    job = Job(hosts=("a",), cores=(1,), devices=(0,), slots=(1,), scheduler=scheduler, id="7")
    with subprocess.Popen(["sleep", "60"], env={**os.environ, found.variable: "7"}) as other:
        time.sleep(0.1)
        message = found.with_others(job, Options(), [os.getpid(), other.pid])
        assert message.startswith(f"process {other.pid} is another launch of this job: {what}")
        assert not found.with_others(replace(job, id="8"), Options(), [other.pid])
        assert not found.with_others(job, Options(hostfile="f"), [other.pid])
        other.kill()


def test_files_of_unfinished_processes_stay_until_somebody_has_reported_them(
    dead: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    gone = f"{dead['pid']}-0a1b2c3d4e5f"
    rank = tmp_path / f"wordrun-{gone}-3-{dead['pid']}"
    single = tmp_path / f"wordrun-launch-{gone}-0-{dead['pid']}"  # of launch with one process
    watched = tmp_path / f"wordrun-{os.getpid()}-0a1b2c3d4e5f-3-{dead['pid']}"  # this launch lives
    alive = tmp_path / f"wordrun-{gone}-3-{os.getpid()}"
    for file, who in ((rank, dead), (single, dead), (watched, dead), (alive, ME)):
        file.write_text(json.dumps(who))
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "WORDRUN_LAUNCH_ID": gone}) as shell:  # a rank_env.sh
        time.sleep(0.1)
        leftovers.clear(str(tmp_path))
        assert len(list(tmp_path.iterdir())) == 4
        shell.kill()
    leftovers.clear(str(tmp_path))
    assert {*tmp_path.iterdir()} == {watched, alive}


def test_old_memory_that_nobody_holds_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shm.ROOT, str(tmp_path))
    for name in ("old", "held", "new"):
        (shm.home() / name / "step-1").mkdir(parents=True)
        if name != "new":
            for path in (shm.home() / name / "step-1", shm.home() / name):
                os.utime(path, (1, 1))
    lock = shm.open_shared(shm.home() / "held")
    leftovers.clear_memory()
    os.close(lock)
    assert {path.name for path in shm.home().iterdir()} == {"held", "new"}
    home = shm.home().rename(tmp_path / "elsewhere")
    shm.home().symlink_to(home)  # somebody else's, who wants to have files of this user removed
    os.utime(home / "held", (1, 1))
    leftovers.clear_memory()
    assert {path.name for path in home.iterdir()} == {"held", "new"}


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="the file system in memory has another name")
def test_mpis_memory_that_nobody_has_mapped_is_removed(tmp_path: Path) -> None:
    files = [Path(f"/dev/shm/mpich_shm_{name}_{os.getpid()}") for name in ("left", "mapped", "new")]
    try:
        for file in files:
            file.write_bytes(bytes(4096))
            if file != files[2]:
                os.utime(file, (1, 1))
        with files[1].open("r+b") as mapped, mmap.mmap(mapped.fileno(), 4096):
            leftovers.clear(str(tmp_path))
            assert [file.exists() for file in files] == [False, True, True]
    finally:
        for file in files:
            file.unlink(missing_ok=True)
