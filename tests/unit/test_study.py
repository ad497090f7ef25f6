"""``wordrun study``: points.csv, how points are run, and the report of a scaling study."""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing
import os
import resource
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wordrun.commands import train
from wordrun.commands.study import main
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.run_dir import OF_ONE_RUN
from wordrun.study import base, launch_pool, scaling
from wordrun.study.placements import Placement
from wordrun.study.points import DONE, FAILED, LAST, OWN, Point, Points, number
from wordrun.study.runner import Runner

OUT = Path("out")
A, B = (Point(name, OUT / "runs" / name, (f"x={x}",), ("-n", "1")) for x, name in enumerate("ab", 1))


def opened(folder: Path, version: int = 1) -> Points:
    return Points(folder, "demo", version, ("speed",))


def test_a_row_for_each_point_and_a_new_one_replaces_the_old(tmp_path: Path) -> None:
    with opened(tmp_path) as points:
        points.put([A], FAILED, "no, it is\n'broken'", speed=None)
        points.put([B], DONE, speed=2 / 3)
        points.put([A], DONE, speed=1)
    with opened(tmp_path) as again:
        assert [(name, row["state"], number(row, "speed")) for name, row in again.rows.items()] == [
            ("a", DONE, 1.0),
            ("b", DONE, 0.666667),
        ]
        again.check([A, B])
    with (tmp_path / "points.csv").open(newline="") as file:
        assert {row["schema"] for row in csv.DictReader(file)} == {"demo-1"}


def test_a_file_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as points:
        points.put([A], DONE, speed=1)
    before = (tmp_path / "points.csv").read_text()
    with pytest.raises(ConfigError, match=r"another study or version of wordrun \(demo-1; this one writes demo-2\)"):
        opened(tmp_path, version=2).__enter__()
    assert (tmp_path / "points.csv").read_text() == before


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\0\xff"])
def test_a_file_that_is_not_a_studys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "points.csv").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="choose another --out"):
        opened(tmp_path).__enter__()


def test_a_point_with_other_options_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as points:
        points.put([A], DONE, speed=1)
        with pytest.raises(ConfigError, match=r"has the point a with other options \(-n 1 x=1\)"):
            points.check([replace(A, overrides=("x=3",))])


def _second(folder: Path, queue: Any) -> None:
    try:
        opened(folder).__enter__()
    except ConfigError as error:
        queue.put(str(error))


def test_two_studies_on_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    context = multiprocessing.get_context("spawn")  # locks are per process
    queue = context.Queue()
    with opened(tmp_path):
        other = context.Process(target=_second, args=(tmp_path, queue))
        other.start()
        message = queue.get(timeout=60)
        other.join()
    assert f"--out {tmp_path} is in use by process {os.getpid()} on {os.uname().nodename} (job 7): wait" in message


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond ``size`` bytes, which raises the same kind of error as a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_loses_no_row(tmp_path: Path) -> None:
    with opened(tmp_path) as points:
        points.put([A], DONE, speed=1)
        size = (tmp_path / "points.csv").stat().st_size
        with largest_file(size), pytest.raises(UserError, match="it has all rows except that of b"):
            points.put([B], DONE, speed=2)
    with largest_file(0), pytest.raises(UserError, match=f"cannot write to {tmp_path}: "), opened(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"points.csv", ".lock"}
    with opened(tmp_path) as again:
        assert list(again.rows) == ["a"]


def rows() -> list[dict[str, str]]:
    """Rows of a study on 1 and 2 ranks, and a failed one."""
    common = dict.fromkeys((*OWN, *LAST, *scaling.COLUMNS), "")
    common |= {"backend": "DDP", "scaling": "strong", "nodes": "1", "state": DONE, "started": "today", "device": "cpu"}
    first = {
        "point": "DDP-1",
        "ranks": "1",
        "tps": "1000",
        "tps_min": "900",
        "tps_max": "1100",
        "step_s": "0.5",
        "memory_gib": "2",
    }
    second = {"point": "DDP-2", "ranks": "2", "tps": "1500", "tps_min": "1500", "tps_max": "1500", "step_s": "0.25"}
    failed = {"point": "DDP-4", "state": FAILED, "reason": "out of | memory"}
    return [{**common, **each} for each in (first, second, failed)]


def test_the_report_has_speed_up_efficiency_and_cost(tmp_path: Path) -> None:
    args = scaling._parse(["--ranks", "1,2,4", "--out", str(tmp_path)])
    names = [path.name for path in scaling.write(tmp_path, rows(), args, ["wordrun", "study", "scaling"])]
    assert names == ["report.md", "scaling.csv", "scaling.png"]
    text = (tmp_path / "report.md").read_text()
    assert "| DDP | 2 | 1,500 | 1,500 | 1,500 | 1.5 | 0.75 | 250 | - | - | 185 |" in text
    assert "![scaling](scaling.png)" in text
    assert r"| DDP-4 | failed | out of \| memory |" in text
    assert "DDP: 1,500 tokens/s on 2 ranks, 1.50 times as many as on 1 (efficiency 75%)" in text
    assert "Speed-up and efficiency refer to the fastest backend on 1 rank." in " ".join(text.split())
    with (tmp_path / "scaling.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["memory_gib"], second["memory_gib"], second["efficiency"]) == ("2", "", "0.75")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1,x", "--out", "o"], "should be positive whole numbers"),
        (["--out", "o"], "--ranks --nodes is required"),
        (["--ranks", "1", "--nodes", "2", "--out", "o"], "not allowed with argument"),
    ],
)
def test_words_that_argparse_refuses(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["scaling", *words])
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1", "train.max_iters=5"], "train.max_iters=5: the study sets this itself"),
        (["--ranks", "1", "--steps", "0"], "should be at least 1"),
        (
            ["--ranks", "1", "--backends", "DPP"],
            "DPP is not one of DDP, FSDP, TP, PP, 3D, deepspeed",
        ),
        (["--ranks", "1", "modle=gpt2"], "did you mean 'model'?"),
        (
            ["--ranks", "1", "--weak", "train.global_batch_size=8"],
            "--weak takes model.batch_size and train.accumulation",
        ),
        (["--nodes", "1,2"], "-N 2: this machine is 1 node; -N 1, or no -N, would fit"),
        (["--ranks", "1", "--launch=--oversubscibe"], "did you mean '--oversubscribe'?"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["scaling", "--out", str(tmp_path / "out"), "data=sample", *words]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()


def test_an_unknown_study(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["scalng"]) == 2
    assert "did you mean 'scaling'?" in capfd.readouterr().err


def arguments(*words: str) -> argparse.Namespace:
    return base.parse_study(argparse.ArgumentParser(), ["--out", str(OUT), *words], (), "")


def test_points_run_side_by_side_on_disjoint_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(f"p{i}", OUT / f"p{i}", (f"x={i}",), ("-N", f"{nodes}")) for i, nodes in enumerate((1, 2, 3, 1))]
    together = []
    start = launch_pool.LaunchPool.start

    def started(self: launch_pool.LaunchPool, point: Point, nodes: int = 1) -> None:
        busy = [each for running in self.running for each in running.placements]
        start(self, point, nodes)
        hosts = Path("out/hosts", point.name).read_text().split()
        assert len(hosts) == int(point.launch[1])
        assert not {host for each in busy for host in each.hosts} & set(hosts)
        together.append((point.name, len(busy)))

    monkeypatch.setattr(launch_pool.LaunchPool, "start", started)
    free = [Placement((host,)) for host in "abc"]
    with opened(OUT) as table:
        runner = Runner(table, ["true"], ["--dry-run"], lambda run: {}, lambda chunk: None)  # type: ignore
        assert runner.run(points, free, lambda row: "", lambda point: int(point.launch[1])) == 1
        assert {row["state"] for row in table.rows.values()} == {FAILED}  # nothing has run
    assert together[:3] == [("p0", 0), ("p1", 1), ("p2", 0)]


def test_a_point_without_room_on_the_disk_ends_the_study_and_is_repeated(tmp_path: Path) -> None:
    Path("point.py").write_text(
        "import sys\nopen('begun', 'a').write(sys.argv[1])\nsys.exit(open(sys.argv[1][2:]).read())\n"
    )
    Path("1").write_text("OSError: No space left on device")
    Path("2").write_text("")

    def run() -> None:
        with opened(OUT) as table:
            runner = Runner(table, ["python", "point.py"], [], lambda run: {}, lambda chunk: None)  # type: ignore
            runner.run([A, B], [Placement()], lambda row: "")

    with pytest.raises(UserError, match="a ran out of disk space"):
        run()
    assert Path("begun").read_text() == "x=1", "the other point was not started"
    Path("1").write_text("another reason")
    run()
    assert Path("begun").read_text() == "x=1x=1x=2", "both were"
    run()
    assert Path("begun").read_text() == "x=1x=1x=2", "other failures stay"


@pytest.fixture
def _sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 17\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")


def submit(*words: str, put: str = "", points: Sequence[Point] = (A,)) -> tuple[int, dict[str, str]]:
    """Call a study that submits its points, of which the first has been submitted before as the job ``put``."""
    with opened(OUT) as table:
        if put:
            table.put([A], "submitted", put)
        args = arguments("--submit", *words)
        status = base.measure(args, table, points, lambda run: {"speed": 3}, lambda row: "")
        return status, table.rows["a"]


@pytest.mark.usefixtures("_sbatch")
def test_jobs_are_submitted_once_and_collected_when_their_runs_have_finished(tmp_path: Path) -> None:
    launch = "--launch=--scheduler slurm --walltime 0:10:00"
    for more in ((), (), ("--retry-failed",)):
        status, row = submit(launch, *more)
        assert (status, row["state"], row["reason"]) == (75, "submitted", "job 17")
        time.sleep(1)  # scripts are named by the second
    assert len(list((tmp_path / "outputs" / "jobs").glob("a-*.sh"))) == 2
    A.dir.mkdir(parents=True)
    (A.dir / "run.json").write_text('{"exit_reason": "finished", "world": {"size": 1, "nodes": 1, "hosts": ["n1"]}}')
    status, row = submit(launch)
    assert (status, row["state"], row["speed"], row["hosts"], row["run_dir"]) == (0, DONE, "3", "n1", "runs/a")


@pytest.mark.usefixtures("_sbatch")
def test_a_job_that_has_ended_without_a_result_has_failed(tmp_path: Path) -> None:
    """Its output says why; while it waits, nothing submits the point again, and a later result counts."""
    queue, squeue = tmp_path / "queue", tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\ncat {queue} 2>&- || {{ echo 'error: Invalid job id specified' >&2; exit 1; }}\n")
    squeue.chmod(0o755)
    queue.write_text("17 debug a PD\n")

    def run(*more: str, put: str = "") -> list[str]:
        _, row = submit("--launch=--scheduler slurm", *more, put=put)
        return [row["state"], row["reason"]]

    assert [run(put="job 17"), run("--retry-failed")] == [["submitted", "job 17"]] * 2
    queue.write_text("")
    assert run() == ["failed", "job 17 printed nothing"]
    queue.unlink()
    (tmp_path / "a-17.out").write_text("PATH=x\ndata.path=x cannot be read\nmore: docs/data.md\nsrun: Terminating\n")
    assert run(put="job 17") == ["failed", "data.path=x cannot be read"]
    A.dir.mkdir(parents=True)
    assert run() == ["failed", "data.path=x cannot be read"]
    assert run("--retry-failed", "--launch=--scheduler slurm --walltime 0:10:00") == ["submitted", "job 17"]
    assert not A.dir.exists(), "or the job would continue the failed run"
    A.dir.mkdir(parents=True)
    (A.dir / "run.json").write_text('{"exit_reason": "finished"}')
    assert run() == ["done", ""]


@pytest.mark.usefixtures("_sbatch")
def test_more_points_than_a_queue_takes_are_refused_before_the_first_is_submitted(tmp_path: Path) -> None:
    launch = "--launch=--site aurora --queue debug --walltime 0:10:00 --account A -N 1 --no-freeze"
    with pytest.raises(ConfigError, match=r"2 jobs: aurora's queue debug accepts 1 job per user .* as one job: launch"):
        submit(launch, points=[replace(A, launch=()), replace(B, launch=())])
    assert not (tmp_path / "outputs").exists()


@pytest.mark.usefixtures("_sbatch")
def test_a_study_submits_a_job_for_each_point(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As its page says, from a login node, which has neither the nodes nor the devices."""
    words = [
        *shlex.split("--submit --nodes 1,2 --weak"),
        "--launch=--site perlmutter --queue regular --walltime 0:20:00 --account A --no-freeze",
        "--out",
        "out",
        "data=sample",
    ]
    assert main(["scaling", *words]) == 75
    assert "start the study again when the jobs have ended" in capfd.readouterr().out
    with Points(tmp_path / "out", "scaling", scaling.VERSION, scaling.COLUMNS) as file:
        found = {
            row["point"]: [row[name] for name in ("state", "ranks", "nodes", "global_batch")]
            for row in file.rows.values()
        }
    assert found == {"DDP-1": ["submitted", "4", "1", "64"], "DDP-2": ["submitted", "8", "2", "128"]}
    scripts = [path.read_text() for path in sorted((tmp_path / "outputs" / "jobs").glob("DDP-*.sh"))]
    assert ["#SBATCH --nodes=1" in scripts[0], "#SBATCH --nodes=2" in scripts[1]] == [True, True]
    assert ["train.global_batch_size=64" in scripts[0], "train.global_batch_size=128" in scripts[1]] == [True, True]


def test_a_study_under_launch_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORDRUN_LAUNCH_ID", "1")
    assert main(["scaling", "--ranks", "1", "--out", "out", "data=sample"]) == 2
    assert "a study starts launch itself" in capfd.readouterr().err


def test_a_study_takes_the_values_that_it_sets() -> None:
    words = ["tracker=[jsonl]", "++train.report=False", "train.eval_interval=0", "data=sample"]
    assert scaling._parse(["--ranks", "1,2", "--out", "o", *words]).overrides == ["data=sample"]


def test_points_are_not_one_run_of_a_tracker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in (*OF_ONE_RUN, "WANDB_RUN_GROUP"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(SystemExit):
        train.main(["-m", "train.seed=1,2", "no.such.option=1"])
    assert [name for name in (*OF_ONE_RUN, "WANDB_RUN_GROUP") if name in os.environ] == ["WANDB_RUN_GROUP"]
    assert [each.message.partition(" ignored: ")[0] for each in caplog.records] == [", ".join(OF_ONE_RUN)]
