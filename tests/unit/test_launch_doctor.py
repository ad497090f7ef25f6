"""What ``launch --doctor`` makes of what the ranks saw."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wordrun import probe
from wordrun.dist.world import World
from wordrun.launch import doctor
from wordrun.launch.command import Decided, Plan, build, decide_ranks
from wordrun.launch.job import Job
from wordrun.launch.launcher import Launcher
from wordrun.launch.options import Options

JOB = Job(
    hosts=("a", "b"), cores=(8, 8), devices=(2, 2), slots=(2, 2), scheduler="slurm", id="7",
    reasons={"hosts": "h"},
)  # fmt: skip
HEALTHY = {
    "host": "a", "problems": [], "size": 4, "local_size": 2, "mpi_size": 4, "meets": "", "cores": 4, "threads": "4",
    "torch_s": 2.0, "devices": 2,
}  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    options = Options(np=4, command=("probe",))
    decided = Decided("1-aa", "R", 12345, str(tmp_path), "/s", "/venv/bin", "a")
    return build(JOB, options, decide_ranks(options, JOB), Launcher("srun", "/usr/bin/srun", "test"), decided, {})


def ranks(**broken: Any) -> list[dict[str, Any]]:
    """Return four healthy ranks, of which the last has something else."""
    lines: list[dict[str, Any]] = [{**HEALTHY, "rank": rank} for rank in range(4)]
    lines[3] |= broken
    return lines


def test_healthy_ranks(plan: Plan) -> None:
    findings = doctor.of_ranks(plan, ranks(), 0, "")
    assert {finding.state for finding in findings} == {"ok"}
    assert {finding.check for finding in findings} >= {"ranks", "MPI", "address", "cores", "threads", "devices"}


BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "singletons": ({"mpi_size": 1}, "MPI", "wrong", "srun --mpi=list"),
    "one core": ({"cores": 1, "threads": "1"}, "cores", "wrong", "srun needs -c"),
    "too many threads": ({"threads": "64"}, "threads", "warning", "unset OMP_NUM_THREADS"),
    "a device lost": ({"devices": 1}, "devices", "wrong", "--hostfile"),
    "crowded": ({"local_size": 4}, "devices", "warning", "--ppn 2"),
    "unreachable": ({"meets": "cannot reach"}, "address", "wrong", "MASTER_ADDR=ADDRESS"),
    "slow disk": ({"torch_s": 90.0}, "import torch", "warning", "node-local"),
    "a contradiction": ({"problems": ["the variables contradict"]}, "ranks", "wrong", ""),
}


@pytest.mark.parametrize(("broken", "check", "state", "remedy"), BROKEN.values(), ids=BROKEN)
def test_each_ailment_has_its_remedy(plan: Plan, broken: dict[str, Any], check: str, state: str, remedy: str) -> None:
    bad = [finding for finding in doctor.of_ranks(plan, ranks(**broken), 0, "") if finding.state != "ok"]
    assert [(finding.check, finding.state) for finding in bad] == [(check, state)]
    assert remedy in bad[0].remedy


def test_ranks_that_do_not_answer(plan: Plan) -> None:
    (finding,) = doctor.of_ranks(plan, ranks()[:3], 1, "line\nsrun: error: n2: task 3: Killed\n")
    assert finding.state == "wrong"
    assert "3 of 4 answered, missing [3]; status 1" in finding.found
    assert "task 3: Killed" in finding.found


def test_what_this_process_sees(plan: Plan, tmp_path: Path) -> None:
    findings = doctor.of_machine(plan, {"PMI_RANK": "0", "TMPDIR": str(tmp_path / "none")})
    by_check = {finding.check: finding for finding in findings}
    assert by_check["variables"].state == "warning"
    assert "unset PMI_RANK" in by_check["variables"].remedy
    assert by_check["TMPDIR"].state == "wrong"
    assert by_check["run directory"].state == "ok"
    long = tmp_path / ("x" * 80)
    long.mkdir()
    assert "too long" in doctor.of_machine(plan, {"TMPDIR": str(long)})[-1].found
    assert doctor.of_machine(replace(plan, env_set={**plan.env_set, "TMPDIR": "/tmp"}), {})[-1].state == "ok"


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MEETING_S", 0.3)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen" in probe.meet(World(rank=0, size=2), "127.0.0.1", port)
    assert "only 0 of 1 other ranks" in probe.meet(World(rank=0, size=2), "127.0.0.1", port)
    assert "cannot reach MASTER_ADDR=127.0.0.1" in probe.meet(World(rank=1, size=2), "127.0.0.1", port)
