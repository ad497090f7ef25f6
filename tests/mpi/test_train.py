"""The command on two ranks: one run directory, one voice, and one end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Command, Start

pytestmark = pytest.mark.forked_programs

SMOKE = ["data=sample", "train=smoke", "tracker=jsonl", "train.max_iters=4", "model.n_layer=2", "model.n_embd=32"]


def run_dirs(cwd: Path) -> list[Path]:
    """Return the run directories below ``cwd``."""
    return sorted(path.parent for path in cwd.glob("outputs/*/*/*/run.json"))


ORDER = """
import sys
from wordrun import cli

status = cli.main(sys.argv[1:])
print("ORDER", *[name for name in sys.modules if name in ("mpi4py.MPI", "torch")], flush=True)
sys.exit(status)
"""


@pytest.mark.forked_programs(False)
@pytest.mark.parametrize("under", ["mpiexec", "torchrun"])
def test_one_run_and_one_voice(under: str, ranks: Any, tmp_path: Path) -> None:
    """MPI is imported before torch, and nothing is drawn where nobody watches."""
    (tmp_path / "order.py").write_text(ORDER)
    done = ranks(2, "order.py", *SMOKE, under=under)
    assert done.returncode == 0, done.stdout + done.stderr
    order = "ORDER mpi4py.MPI torch" if under == "mpiexec" else "ORDER torch"
    assert [line for line in done.stdout.splitlines() if "ORDER" in line] == [order] * 2
    assert "\x1b[" not in done.stdout
    (run_dir,) = run_dirs(tmp_path)
    record = json.loads((run_dir / "run.json").read_text())
    assert record["world"]["size"] == 2
    assert record["world"]["launcher"] == {"mpiexec": "hydra", "torchrun": "torchrun"}[under]
    assert record["exit_reason"] == "finished"
    assert done.stdout.count("step 4/4  loss") == 1
    assert done.stdout.count("run directory:") == 2  # at the start and at the end
    assert (tmp_path / "outputs" / "latest").resolve() == run_dir


def test_mistakes_are_printed_once(ranks: Any, tmp_path: Path) -> None:
    done = ranks(2, "-m", "wordrun", "data=sample", "train.max_itrs=3", "model.n_head=3", under="fork")
    assert done.returncode == 2
    assert done.stderr.count("unknown option 'train.max_itrs'; did you mean 'train.max_iters'?") == 1
    assert done.stderr.count("model.n_embd=128 is not divisible by model.n_head=3") == 1
    assert "Abort" not in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("words", [["python", "-m", "wordrun"], ["sh", "-c", 'exec wordrun "$@"', "sh"]], ids=" ".join)
def test_an_error_of_all_ranks_is_printed_once(command: Command, tmp_path: Path, words: list[str]) -> None:
    done = command("launch", "-n", "2", *words, "data=text", "data.path=nothing.txt")
    assert done.returncode == 2
    assert done.stderr.count("nothing.txt cannot be read: No such file or directory") == 1
    assert "Traceback" not in done.stderr
    assert "ended with exit status" not in done.stderr
    assert run_dirs(tmp_path) == []


CRASH = """
from pathlib import Path
import torch
import torch.distributed as td
import wordrun.dist as dist

with dist.session() as world:
    td.all_reduce(torch.ones(1))
    if world.rank == 1:
        Path("raised").touch()
        raise ValueError("a bug on one rank")
    td.all_reduce(torch.ones(1))
"""


@pytest.mark.forked_programs(False)
@pytest.mark.parametrize("under", ["torchrun", "launch"])
def test_a_rank_that_raises_ends_the_job(under: str, ranks: Any, command: Any, tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(CRASH)
    if under == "launch":
        done = command("launch", "-n", "2", "python", "crash.py")
    else:
        done = ranks(2, "crash.py", under=under)
    assert time.time() - (tmp_path / "raised").stat().st_mtime < 30
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a bug on one rank") == 1
    assert re.search(r"^\[rank 1\] failed on host \S+\n(\[rank 1\] )?Traceback", done.stderr, re.MULTILINE)
    assert "terminate called" not in done.stderr


def test_leaving_without_cleanup_is_quiet(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import wordrun.dist as dist, torch, torch.distributed as td\ndist.setup()\ntd.all_reduce(torch.ones(1))\n"
    )
    done = ranks(2, "script.py")
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr


def test_a_size_that_mpi_contradicts_stops_the_job(command: Any) -> None:
    """A launcher says two ranks, but MPI, started without it, is alone: mpiexec and libmpi of different kinds."""
    recorded = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in recorded.items()}
    done = command(sys.executable, "-m", "wordrun", *SMOKE, **env)
    assert done.returncode == 2
    assert "openmpi started 2 ranks" in done.stderr
    assert "but MPI sees 1" in done.stderr
    assert re.search(r"library: +\S*libmpi\S*", done.stderr)
    assert re.search(r"launcher: +/\S+", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    # SIGTERM to ranks that users start: test_next_steps.py.
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.forked_programs(False)), (signal.SIGTERM, 75)],
)
def test_a_signal_ends_the_run_after_a_whole_step(
    number: signal.Signals, status: int, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMOKE, "train.max_iters=100000", "train.eval_interval=0"]
    if drawn := number == signal.SIGINT:  # both signals take the same way out
        monkeypatch.setenv("DRAWN_BY_TESTS", "1")
        words += ["profiler=pyinstrument"]
    job = start("launch", "-n", "2", "python", "-m", "wordrun", *words, stderr=subprocess.STDOUT)
    while not ((found := run_dirs(tmp_path)) and '"step": 5,' in (found[0] / "metrics.jsonl").read_text()):
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(number)
    rest, _ = job.communicate(timeout=60)
    assert job.returncode == status, rest
    (run_dir,) = found
    record = json.loads((run_dir / "run.json").read_text())
    assert record["exit_reason"] == f"stopped by {number.name}, saved"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert record["steps"] >= 5
    assert lines[-1]["step"] == record["steps"]  # log_interval=1: every step that was done is there
    if drawn:
        assert (run_dir / "plots" / "loss.png").stat().st_size > 5000
        assert "Trainer.train" in (run_dir / "profile" / "pyinstrument.txt").read_text()
    assert "Traceback" not in rest
    # The launch's record has moved into the run directory.
    launched = json.loads((run_dir / "launch.json").read_text())
    assert (launched["exit_status"], launched["np"], launched["run_id"]) == (status, 2, run_dir.name)
    (link,) = (tmp_path / "outputs" / "launches").iterdir()
    assert link.resolve() == run_dir / "launch.json"


SLOW = """
import sys, time
from wordrun import cli

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            sys.stdout.write("importing torch\\n")
            sys.stdout.flush()
            time.sleep(5)

sys.meta_path.insert(0, Slow())
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.forked_programs(False)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_asks_for_another_start(
    number: signal.Signals, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    job = start("launch", "-n", "2", "python", "slow.py", *SMOKE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    lines: list[str] = []
    while "".join(lines).count("importing torch") < 2:
        lines.append(job.stdout.readline())
        assert lines[-1], lines
    assert lines[0].startswith("launch: starting 2 ranks on 1 host with ")  # says at once what is waited for
    assert "loading torch on 2 ranks" in "".join(lines)
    job.send_signal(number)
    rest, _ = job.communicate(timeout=60)
    assert job.returncode == 75, rest
    # launch's own; rank 0 may be ended by another before it says why
    assert re.search(r"to continue:\n.*WORDRUN_RESUME=auto launch -n 2 python slow\.py", rest)
    assert "Traceback" not in rest


def test_progress_bar_where_a_person_watches(ranks: Any) -> None:
    watched = ranks(2, "-m", "wordrun", *SMOKE, under="fork", WORDRUN_TERMINAL="100x30", TERM="xterm-256color")
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert re.search(r"training .*4/4", watched.stdout)
    assert "\x1b[" in watched.stdout
    assert re.search("[\u2801-\u28ff]", watched.stdout), "the loss curve"


def test_warnings_of_other_ranks_carry_their_rank(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "warn.py").write_text(
        "from wordrun import dist; from wordrun.common import log\nworld = dist.identify()\nlog.start(world.rank)\n"
        "log.LOGGER.warning('look out')\nlog.LOGGER.info('all is well')\n"
    )
    done = ranks(2, "warn.py", under="fork")
    assert done.stdout.count("look out") == 2
    assert done.stdout.count("[rank 1] look out") == 1
    assert done.stdout.count("all is well") == 1


def test_sweep_inside_ranks_is_refused(ranks: Any) -> None:
    done = ranks(2, "-m", "wordrun", "-m", "data=sample", "train.seed=1,2", under="fork")
    assert done.returncode == 2
    assert done.stderr.count("run it without launch") == 1


def test_bandwidths_are_measured(command: Any, ranks: Any, tmp_path: Path) -> None:
    bench = ["-m", "wordrun.test_dist", "--bench", "--sizes", "4KB..16KB"]
    done = command("launch", "-n", "2", "python", *bench, "--layout", "shard=2", "--out", "b")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "b" / "bandwidth.json").read_text())
    assert (tmp_path / "b" / "bandwidth.png").stat().st_size > 10_000
    assert (found["ranks"], found["nodes"], found["pairs"]) == (2, 1, [])
    busbw = {
        "all_reduce": 1,
        "all_reduce (mpi4py)": 1,
        "broadcast": 1,
        "point_to_point": 1,
        "all_gather": 0.5,
        "reduce_scatter": 0.5,
        "all_to_all": 0.5,
    }
    assert {(result["operation"], result["size"]) for result in found["results"]} == {
        (name, size) for name in busbw for size in (4096, 16384)
    }
    for result in found["results"]:
        assert result["group"] == "all ranks"  # the axis is all ranks, too
        assert 0 < result["seconds_min"] <= result["seconds"] <= result["seconds_max"] < 60
        assert result["algbw"] == pytest.approx(result["size"] / result["seconds"] / 1e9)
        assert result["busbw"] == pytest.approx(result["algbw"] * busbw[result["operation"]])
        assert f"  {result['operation']:<24}" in done.stdout
    wrong = ranks(2, *bench, "--layout", "tp=3", under="fork")
    assert wrong.returncode == 2
    assert "--layout tp=3 is for 3 ranks, but there are 2" in wrong.stderr + wrong.stdout


def test_smoke_check(command: Any) -> None:
    done = command("launch", "-n", "2", "python", "-m", "wordrun.test_dist")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"[cpu] [rank {rank} of 2] [local rank {rank} of 2] [node 0 of 1]" in done.stdout
    for check in ("all_reduce", "reduce", "broadcast", "all_gather", "scatter", "barrier"):
        assert re.search(rf"^{check}: ok", done.stdout, re.MULTILINE)
    assert "train: step 100/100" in done.stdout
    assert "Recorded:" in done.stdout  # the PyInstrument profile


def test_smoke_check_names_what_fails(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import torch.distributed as td\nfrom wordrun import test_dist\n"
        "td.broadcast = lambda *a, **k: None\n"  # a collective that does nothing
        "raise SystemExit(test_dist.main(['--no-profile']))\n"
    )
    done = ranks(2, "broken.py", under="fork")
    assert done.returncode != 0
    assert "check broadcast failed" in done.stderr
    assert "got [10.0, 10.0, 10.0], expected [11.0, 11.0, 11.0]" in done.stderr


def test_an_impossible_run_directory_is_one_message(ranks: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ranks(2, "-m", "wordrun", *SMOKE, f"hydra.run.dir={tmp_path}/file/run", under="fork")
    assert done.returncode == 2
    assert done.stderr.count("cannot write to the run directory") == 1
    assert "Traceback" not in done.stderr


def test_a_full_disk_ends_all_ranks_with_one_message(ranks: Command, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").symlink_to("/dev/full")
    done = ranks(2, "-m", "wordrun", *SMOKE, f"hydra.run.dir={run_dir}", under="fork")
    assert done.returncode == 1
    assert done.stderr.count("metrics.jsonl on ") == 1
    assert done.stderr.count("No space left on device. What was written before is intact.") == 1
    assert "Traceback" not in done.stderr
    assert "OSError" in json.loads((run_dir / "run.json").read_text())["exit_reason"]


def test_contradictory_variables_stop_any_script(command: Any) -> None:
    wrong = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    done = command(sys.executable, "-m", "wordrun.test_dist", **wrong)
    assert done.returncode == 2
    assert "contradict each other: rank 3 of 2" in done.stderr
    assert "Traceback" not in done.stderr
