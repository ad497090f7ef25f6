"""Sweeps whose points are launches: where they run, what is shown, what is continued, and what is refused."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from wordrun.commands.train import main, sweep_points
from wordrun.common.errors import ConfigError
from wordrun.config.compose import compose
from wordrun.launch.job import Job
from wordrun.launch.job_script import Origin, script
from wordrun.launch.parser import parse
from wordrun.launch.ranks import decide_ranks
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import UNKNOWN
from wordrun.study import node_share, search, sweep as sweeps
from wordrun.study.options import LauncherOptions
from wordrun.study.placements import divide
from wordrun.study.sweep import together

if TYPE_CHECKING:
    from conftest import Start

# Instead of wordrun: fails, waits, or reports x as its loss.
POINT = """
import json, os, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
run = Path(words["hydra.run.dir"])
run.mkdir(parents=True, exist_ok=True)
(run / "ids").open("a").write(os.environ["WORDRUN_RUN_ID"] + "\\n")
if words["x"] in os.environ.get("FAIL", "").split():
    sys.exit("x is not good")
(run / "metrics.jsonl").write_text(json.dumps({"step": 1, "val_loss": float(words["x"])}) + "\\n")
if words.get("wait"):
    time.sleep(600)
(run / "run.json").write_text(json.dumps({"exit_reason": "finished"}))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "point.py").write_text(POINT)
    return [sys.executable, "point.py"]


def sweep(command: list[str], *values: str, **options: Any) -> int:
    batch = [[f"x={value}", "y=0"] for value in values]
    return sweeps.launch(Path("s"), command, LauncherOptions(**options), batch, lambda words, number: str(number))


def rows_of(folder: str) -> list[dict[str, str]]:
    with Path(folder, "points.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_shows_the_metric_that_counts(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    text = POINT.replace('"val_loss": float(words["x"])', '"val_loss": 5, "val_hits": float(words["x"])')
    text = text.replace('"exit_reason"', '"best_metric": "val_hits", "best_mode": "max", "exit_reason"')
    Path(command[1]).write_text(text)
    assert sweep(command, "1", "2") == 0
    out = capfd.readouterr().out
    assert out.count("best val_hits 1.0000") == 2, "in a line and in the table"


def test_failures_stop_nothing_and_are_what_a_sweep_continues_with(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL", "2")
    assert sweep(command, "1", "2", "3", parallel=2) == 1
    out = capfd.readouterr().out
    assert "sweep s: 3 points, 2 at a time" in out
    assert "point 1 failed (s/1.log): x is not good" in out.splitlines()
    assert "sweep s: 2 finished, 1 failed" in out
    assert "wordrun sweep s runs the unfinished points" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["finished"] and row[-1].startswith("x=")] == ["0", "2"]
    assert ["2", "finished", "best", "val_loss", "3.0000", "x=3"] in [[*row[:2], *row[3:]] for row in rows]

    monkeypatch.delenv("FAIL")
    assert sweep(command, "0", "1", "2", "3", resume=True) == 0
    out = capfd.readouterr().out
    assert "sweep s: 2 points, 1 at a time; not run: 2 finished" in out
    assert "sweep s: 4 finished" in out
    assert [(row["point"], row["state"], row["best"]) for row in rows_of("s")] == [
        ("0", "done", "1"),
        ("1", "done", "2"),
        ("2", "done", "3"),
        ("3", "done", "0"),
    ]
    runs = {number: len(Path(f"s/{number}/ids").read_text().split()) for number in range(4)}
    assert runs == {0: 1, 1: 2, 2: 1, 3: 1}, "points keep their directories, and a new one gets the next number"
    ids = {Path(f"s/{number}/ids").read_text().split()[-1] for number in range(4)}
    assert len(ids) == 4
    assert len(set(Path("s/1/ids").read_text().split())) == 1, "the run ID stays when a point is started again"
    assert sweeps.main(["s"]) == 0
    assert "sweep s: 0 points" in capfd.readouterr().out


def test_some_points_run_beside_others_and_leave_the_table_alone(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in jobs of several points, which run at the same time."""
    monkeypatch.setenv("FAIL", "1 2")
    assert sweep(command, "1", "2", "3") == 1
    monkeypatch.delenv("FAIL")
    before = Path("s/points.csv").read_text()
    assert sweeps.main(["s", "1"]) == 0
    assert "sweep s: 1 finished" in capfd.readouterr().out
    assert Path("s/points.csv").read_text() == before
    assert sweeps.main(["s"]) == 0
    assert "sweep s: 1 point, 1 at a time; not run: 2 finished" in capfd.readouterr().out
    assert [row["state"] for row in rows_of("s")] == ["done"] * 3


def test_ctrl_c_ends_the_running_points_and_starts_no_other(command: list[str], start: Start, tmp_path: Path) -> None:
    """One line says so, the points end in good order, and the sweep can be continued."""
    (tmp_path / "run.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from wordrun.study import options, sweep\n"
        "batch = [[f'x={n}', 'wait=1'] for n in range(3)]\n"
        "launcher = options.LauncherOptions(parallel=2)\n"
        f"sys.exit(sweep.launch(Path('s'), {command}, launcher, batch, lambda words, number: str(number)))\n"
    )
    process = start(sys.executable, "run.py", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    seen = ""
    while "point 1  started" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert err == "stopping: no more points start; waiting for 2 running points to end\n"
    assert "sweep s: 2 stopped, 1 not started" in out
    assert not (tmp_path / "s" / "2").exists()


def host(count: int, slots: int, devices: int = 0, scheduler: str = "slurm", cores: int = 8) -> Job:
    names = tuple(f"n{number}" for number in range(1, count + 1))
    return Job(names, (cores,) * count, (devices,) * count, (slots,) * count, scheduler)


def test_points_are_placed_on_disjoint_nodes_or_parts_of_them() -> None:
    def places(job: Job, **options: Any) -> list[tuple[str, str]]:
        wanted = LauncherOptions(**options)
        ranks = decide_ranks(parse([*wanted.launch(), "x"]), job)
        found = divide(wanted, job, ranks, threads_given=False)
        return ["+".join(each.hosts) + f" {each.share}/{each.shares}" for each in found]

    laptop = host(1, 1, scheduler="none", cores=2)
    assert places(laptop) == [" 0/1"]
    assert places(laptop, parallel=2) == [" 0/2", " 1/2"]
    assert places(host(1, 4, 4, scheduler="none"), np=2) == [" 0/2", " 1/2"]
    assert places(host(1, 4, 4, scheduler="none"), parallel=3) == [" 0/3", " 1/3", " 2/3"]
    assert places(host(4, 4, 4), nodes=2) == ["n1+n2 0/1", "n3+n4 0/1"]
    assert places(host(3, 4, 4), np=8) == ["n1+n2 0/1"]
    assert places(host(2, 4, 4), np=2) == ["n1 0/2", "n2 0/2", "n1 1/2", "n2 1/2"]
    assert places(host(2, 4, 4), np=2, parallel=2) == ["n1 0/1", "n2 0/1"]
    assert places(host(2, 1), np=4) == ["n1+n2 0/1"]


def test_a_part_of_a_node_has_its_cores_threads_and_devices() -> None:
    wanted = LauncherOptions(np=2, args="--launcher-args '-v -v'")
    job = host(1, 4, 4)
    places = divide(wanted, job, decide_ranks(parse(["-n", "2", "x"]), job), threads_given=False)
    words = places[1].words(wanted.launch(), Path("hosts"))
    assert words[:2] == ["-n", "2"]
    assert words[-4:] == [sys.executable, "-m", "wordrun.study.node_share", "1/2"]
    assert parse(words).launcher_args == ("-v", "-v", "--overlap")
    assert dict(parse(words).env) == {"OMP_NUM_THREADS": "2"}
    assert Path(str(parse(words).hostfile)).read_text() == "n1\n"
    assert node_share.portion(list("01234567"), 1, 2) == list("4567")
    assert node_share.portion(["0"], 1, 2) == ["0"]
    assert node_share.devices({}, 4, 1, 2) == {"CUDA_VISIBLE_DEVICES": "2,3", "ZE_AFFINITY_MASK": "2,3"}
    assert node_share.devices({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 4, 0, 2)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert node_share.devices({}, 0, 0, 2) == {}


def test_points_in_a_pbs_job_name_their_hosts_and_are_warned_before_its_end() -> None:
    """PBS sends no signal before the time limit, and knows no steps."""
    wanted = LauncherOptions(nodes=1, ppn=4, args="--walltime-margin 60")
    job = host(2, 4, 4, scheduler="pbs")
    places = divide(wanted, job, decide_ranks(parse([*wanted.launch(), "x"]), job), threads_given=False)
    options = [parse(place.words(wanted.launch(), Path(f"hosts/{at}"))) for at, place in enumerate(places)]
    assert [Path(str(each.hostfile)).read_text() for each in options] == ["n1\n", "n2\n"]
    assert [(each.walltime_margin, each.launcher_args) for each in options] == [(60.0, ())] * 2
    assert parse(places[0].words(["-n", "1"], Path("hosts/0"))).walltime_margin == 120


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_part_has_its_own_cores() -> None:
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    words = [sys.executable, "-m", "wordrun.study.node_share"]
    found = [
        json.loads(subprocess.run([*words, f"{each}/2", sys.executable, "-c", show], capture_output=True).stdout)
        for each in range(2)
    ]
    assert found[0]
    assert len(found[0]) == len(found[1])
    assert not set(found[0]) & set(found[1])


def exit_status(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as error:
        return int(str(error.code))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra.launcher.npp=2"], "unknown option 'hydra.launcher.npp' of hydra/launcher=wordrun; did you mean"),
        (["hydra.launcher.np=0"], "hydra.launcher.np=0 should be at least 1"),
        (["hydra.launcher.nodes=3"], "a point of this sweep does not fit: -N 3: this machine is 1 node"),
        (["hydra.launcher.args=--foo"], "unknown option '--foo'"),
        (["hydra.launcher.queue=q"], "hydra.launcher.queue is only for submitted jobs: add hydra.launcher.submit=true"),
        (["hydra.launcher.submit=true"], "hydra.launcher.submit=true needs hydra.launcher.walltime=H:MM:SS"),
        (["hydra.launcher.resume=true"], "there is no sweep in s; set its folder with hydra.sweep.dir=DIR"),
        (["hydra.sweep.subdir=same"], "hydra.sweep.subdir=same is the same for points 0 and 1"),
        (["hydra.sweep.dir=/proc/none"], "hydra.sweep.dir=/proc/none cannot be created"),
    ],
)
def test_bad_options_start_nothing(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = exit_status("-m", "train.seed=1,2", "hydra.sweep.dir=s", *words, "hydra/launcher=wordrun")
    err = capfd.readouterr().err
    assert message in err
    assert len(err.partition("\nmore: docs/sweeps.md#")[0].splitlines()) == 1
    assert status == 2
    assert not list(Path().glob("s/*.log"))
    assert not Path("s/sweep.json").exists()


def test_launcher_options_without_the_launcher_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_status("-m", "train.seed=1,2", "hydra.launcher.np=2") == 2
    expected = "unknown option 'hydra.launcher.np' of hydra/launcher=basic: add hydra/launcher=wordrun\n"
    assert capfd.readouterr().err == expected


def test_a_folder_with_a_sweep_is_not_used_for_another(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep(command, "1") == 0
    with pytest.raises(ConfigError, match="already contains a sweep of 1 points: continue it with"):
        sweep(command, "1")
    file = tmp_path / "s" / "sweep.json"
    file.write_text("{")
    assert sweeps.main(["s"]) == 2
    assert "sweep.json cannot be read" in capfd.readouterr().err
    assert sweeps.main(["none"]) == 2
    assert "none contains no sweep" in capfd.readouterr().err


# Jobs


def test_points_are_submitted_one_per_job_or_several(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "sbatch").write_text("#!/bin/sh\necho 42\n")
    (bin_folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    base = [sys.executable, "-m", "wordrun"]
    options = {"np": 2, "submit": True, "walltime": "0:10:00"}
    assert sweep(base, "1", "2", "3", **options) == 0
    scripts = [path.read_text() for path in sorted((tmp_path / "outputs" / "jobs").glob("sweep-?-*.sh"))]
    assert [text.count("launch -n 2 ") for text in scripts] == [1, 1, 1]
    assert f"-m wordrun x=2 y=0 hydra.run.dir={tmp_path}/s/1" in scripts[1]
    assert len({line for text in scripts for line in text.splitlines() if line.startswith("cd ")}) == 1, "one copy"
    assert "point 2: job 42" in capfd.readouterr().out
    sweep_id = json.loads((tmp_path / "s" / "sweep.json").read_text())["id"]
    assert f"export WORDRUN_RUN_ID={sweep_id}-1" in scripts[1]

    shutil.rmtree(tmp_path / "outputs")
    assert sweep(base, "1", "2", "3", resume=True, points_per_job=2, args="--no-freeze", **options) == 0
    scripts = [path.read_text() for path in sorted((tmp_path / "outputs" / "jobs").glob("sweep-?-*.sh"))]
    assert f"-m wordrun sweep {tmp_path}/s 0 1\n" in scripts[0]
    assert f"-m wordrun sweep {tmp_path}/s 2\n" in scripts[1]
    assert "#SBATCH --nodes=2" in scripts[0]
    assert "#SBATCH --ntasks-per-node=2" in scripts[0]
    assert "#SBATCH --signal=USR1@" in scripts[0], "the points' ranks are warned"
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["options"]["points_per_job"] == 2
    assert [(row["state"], row["reason"]) for row in rows_of("s")] == [("submitted", "job 42")] * 3

    (bin_folder / "squeue").write_text("#!/bin/sh\necho $3 R\n")
    (bin_folder / "squeue").chmod(0o755)
    shutil.rmtree(tmp_path / "outputs")
    assert sweep(base, "1", "2", "3", resume=True, **options) == 0
    assert "sweep s: 0 points to submit; not run: 3 submitted" in capfd.readouterr().out
    assert not (tmp_path / "outputs").exists()


def test_more_points_than_a_queue_takes_are_refused_before_the_first_is_submitted(
    command: list[str], tmp_path: Path
) -> None:
    options = {"np": 2, "submit": True, "walltime": "0:10:00", "queue": "debug", "args": "--site aurora --account A"}
    with pytest.raises(ConfigError, match=r"2 jobs: aurora's queue debug accepts 1 job .*points_per_job=N"):
        sweep(command, "1", "2", **options)
    assert not (tmp_path / "outputs").exists()


def test_a_job_of_several_points_has_their_nodes() -> None:
    def size(count: int, *words: str, **options: Any) -> tuple[int | None, int | None]:
        done = together(LauncherOptions(**options), parse([*words, "x"]), UNKNOWN, count)
        return done.nodes, done.ppn

    assert size(3, "-n", "2") == (3, 2)
    assert size(3, "-n", "2", job_nodes=2) == (2, 2)
    assert size(3, "-N", "2", "--ppn", "4") == (6, 4)
    with pytest.raises(ConfigError, match="job_nodes=1: one point needs 2 nodes"):
        size(3, "-N", "2", "--ppn", "4", job_nodes=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["wordrun", "-m", "a=1,2", "hydra/launcher=wordrun"], True),
        (["python", "-m", "wordrun", "-m", "hydra/sweeper=wordrun_optuna"], True),
        (["wordrun", "sweep", "dir"], True),
        (["wordrun", "-m", "a=1,2"], False),
        (["python", "-m", "wordrun", "a=1", "hydra/launcher=wordrun"], False),
        (["python", "train.py", "sweep"], False),
    ],
)
def test_a_sweep_in_a_job_is_not_run_as_ranks(words: list[str], expected: bool) -> None:
    options = parse(["--submit", "-N", "2", "--walltime", "1:00:00", "--", *words])
    assert options.sweeps is expected
    text = script(options, UNKNOWN, SCHEDULERS["slurm"], Origin("/", "/no/venv", ""), "id")
    assert (shlex.join(words) in text.splitlines()) is expected


# Pages


def test_the_pages_commands_are_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    lines = [
        shlex.split(line) for line in text.splitlines() if line.startswith(("    wordrun -m ", "    launch --submit "))
    ]
    assert len(lines) == 8
    for words in lines:
        if words[0] == "launch":
            options = parse(words[1:])
            assert options.sweeps
            words = list(options.command)
        compose(sweep_points(words[2:])[0])
        if any("optuna" in word for word in words):
            space, _ = search.parse([word for word in words[2:] if not word.startswith("hydra")])
            assert space
