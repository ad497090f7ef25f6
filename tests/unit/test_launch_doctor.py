"""What ``launch --doctor`` makes of what the ranks saw."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wordrun.commands import probe
from wordrun.dist.world import World
from wordrun.launch import doctor, dry_run
from wordrun.launch.address import free_port
from wordrun.launch.job import Job
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.options import Options
from wordrun.launch.plan import LaunchPlan, build
from wordrun.launch.ranks import decide_ranks
from wordrun.launch.request import Decided, Identity
from wordrun.launch.site import Site

JOB = Job(
    hosts=("a", "b"), cores=(8, 8), devices=(2, 2), slots=(2, 2), scheduler="slurm", id="7", reasons={"hosts": "h"}
)
# 64 threads on 32 cores: core 8 has the threads 8 and 40.
SITE = Site(name="made up", cores=64, cores_near_device=("0-7", "8-15"))
HEALTHY = {
    "host": "a",
    "problems": [],
    "size": 4,
    "local_size": 2,
    "mpi_size": 4,
    "meets": "",
    "cores": 4,
    "threads": "4",
    "torch_s": 2.0,
    "devices": 2,
    "unreached": [],
    "all_reduce": "",
    "own_address": "10.0.0.1",
    "interface": "",
}


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    options = Options(np=4, command=("probe",))
    decided = Decided("1-aa", Identity("R"), 12345, str(tmp_path), "/launches", "/s", "/venv/bin", "a")
    return build(JOB, options, decide_ranks(options, JOB), LAUNCHERS["srun"]("/usr/bin/srun", "test"), decided, {})


def ranks(**broken: Any) -> list[dict[str, Any]]:
    """Return four healthy ranks, of which the last has something else."""
    own = [{"rank": rank, "device": rank % 2, "affinity": [(0, 40)[rank % 2]]} for rank in range(4)]
    lines: list[dict[str, Any]] = [{**HEALTHY, **own[rank], "host": "ab"[rank // 2]} for rank in range(4)]
    lines[3] |= broken
    return lines


def test_healthy_ranks(plan: LaunchPlan) -> None:
    findings = doctor.of_ranks(plan, ranks(), 0, "", SITE)
    assert {finding.state for finding in findings} == {"ok"}
    assert {finding.check for finding in findings} >= {"ranks", "MPI", "address", "cores", "threads", "devices"}
    assert {finding.check for finding in findings} >= {"sockets", "device order"}


def measured(tmp_path: Path, pairs: dict[str, float], device: str = "cuda:0") -> None:
    """Write a bandwidth.json with the speeds of pairs of nodes such as ``a b``."""
    folder = tmp_path / "outputs" / "bandwidth" / "20260101-120000"
    folder.mkdir(parents=True, exist_ok=True)
    found = [{"hosts": names.split(), "seconds": 1.0, "gb_per_s": speed} for names, speed in pairs.items()]
    (folder / "bandwidth.json").write_text(json.dumps({"device": device, "pairs": found}))


def test_slow_nodes_are_named_where_the_site_knows_its_network(plan: LaunchPlan, tmp_path: Path) -> None:
    site = replace(SITE, network=25.0)
    (found,) = doctor.of_network(plan, site)
    assert (found.state, found.found.partition(":")[0]) == ("ok", "not measured between these nodes")
    measured(tmp_path, {"a b": 20.0, "a.domain c": 4.0, "b c": 1.0, "d e": 1.0})
    assert doctor.of_network(plan, SITE) == [], "an unknown network"
    (found,) = doctor.of_network(plan, replace(site, network=40.0))
    assert found.state == "warning"
    assert found.found.startswith("slow: b 10.5 GB/s; made up expects 40 GB/s per device (")
    assert "--hostfile" in found.remedy
    measured(tmp_path, {"a b": 20.0})
    (found,) = doctor.of_network(plan, site)
    assert (found.state, found.found) == ("ok", "20 to 20 GB/s between nodes; made up expects 25 GB/s per device")
    measured(tmp_path, {"a b": 2.0})
    (found,) = doctor.of_network(plan, site)
    assert "the fast network is used" in found.remedy
    (tmp_path / "outputs/bandwidth/20260101-120000/bandwidth.json").write_text("{")
    assert doctor.of_network(plan, site)[0].state == "ok"


@pytest.mark.parametrize("network", [None, 25.0])
def test_a_node_that_is_slow_over_gloo_is_compared_with_the_others(
    network: float | None, plan: LaunchPlan, tmp_path: Path
) -> None:
    """gloo does not use the network in the site's file."""
    job = replace(JOB, hosts=("a", "b", "c", "d"), cores=(8,) * 4, devices=(0,) * 4, slots=(2,) * 4)
    four = replace(plan, job=job, ranks=decide_ranks(Options(np=8), job))
    measured(tmp_path, {"a b": 2.0, "a c": 0.1, "a d": 2.2, "b c": 0.1, "b d": 1.9, "c d": 0.12}, device="cpu")
    (found,) = doctor.of_network(four, replace(SITE, network=network))
    assert (found.state, found.found.partition(" (")[0]) == ("warning", "slow: c 0.1 GB/s; median 1.9 GB/s")
    assert "--hostfile" in found.remedy
    measured(tmp_path, {"a b": 2.0, "a c": 1.8}, device="cpu")
    (found,) = doctor.of_network(four, replace(SITE, network=network))
    assert (found.state, found.found) == ("ok", "1.8 to 2 GB/s between nodes; median 1.9 GB/s (gloo)")


def test_cores_that_ranks_share_are_not_counted_twice(plan: LaunchPlan) -> None:
    cores = min(plan.job.cores)
    findings = doctor.of_ranks(plan, [{**rank, "cores": cores} for rank in ranks()], 0, "", SITE)
    (found,) = (finding.found for finding in findings if finding.check == "cores")
    assert found == f"{cores}, shared by {plan.ranks.ppn} ranks"


BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "singletons": ({"mpi_size": 1}, "MPI", "wrong", "srun --mpi=list"),
    "one core": ({"cores": 1, "threads": "1"}, "cores", "wrong", "srun needs -c"),
    "too many threads": ({"threads": "64"}, "threads", "warning", "unset OMP_NUM_THREADS"),
    "a device lost": ({"devices": 1}, "devices", "wrong", "--hostfile"),
    "crowded": ({"local_size": 4}, "devices", "warning", "--ppn 2"),
    "unreachable": ({"meets": "cannot reach"}, "address", "wrong", "MASTER_ADDR=ADDRESS"),
    "closed ports": ({"unreached": ["rank 2 on b: refused"]}, "sockets", "wrong", "GLOO_SOCKET_IFNAME"),
    "no sum": ({"all_reduce": "connection refused"}, "all-reduce", "wrong", "GLOO_SOCKET_IFNAME=NAME"),
    "a loopback name": (
        {"own_address": "127.0.1.1", "interface": "eth0"},
        "all-reduce",
        "warning",
        "mend the line of /etc/hosts that begins with 127.0.1.1 on b",
    ),
    "one device twice": ({"device": 0}, "device order", "wrong", "--gpu-bind=none"),
    "one device twice, by its hardware": ({"device_id": "0"}, "device order", "wrong", "--gpu-bind=none"),
    "far cores": ({"affinity": [0, 32]}, "device order", "wrong", "leave --cpu-bind out"),
    "slow disk": ({"torch_s": 90.0}, "import torch", "warning", "node-local"),
    "a contradiction": ({"problems": ["the variables contradict"]}, "ranks", "wrong", ""),
}


@pytest.mark.parametrize(("broken", "check", "state", "remedy"), BROKEN.values(), ids=BROKEN)
def test_each_problem_has_its_remedy(
    plan: LaunchPlan, broken: dict[str, Any], check: str, state: str, remedy: str
) -> None:
    bad = [finding for finding in doctor.of_ranks(plan, ranks(**broken), 0, "", SITE) if finding.state != "ok"]
    assert [(finding.check, finding.state) for finding in bad] == [(check, state)]
    assert remedy in bad[0].remedy


def test_devices_that_torch_does_not_see(plan: LaunchPlan) -> None:
    """The ranks would run on CPUs, which is right only where launch has counted no devices, or the user hides them."""

    def found(plan: LaunchPlan, **more: str) -> doctor.Finding:
        lines = [{**rank, "devices": 0, "device": None, "torch": "torch 2.8.0+cpu", **more} for rank in ranks()]
        findings = doctor.of_ranks(plan, lines, 0, "", replace(SITE, modules=("module load torch",)))
        return next(finding for finding in findings if finding.check == "devices")

    counted = replace(plan, job=replace(JOB, reasons={"devices": "site made up"}))
    wrong = found(counted)
    assert wrong.state == "wrong"
    assert wrong.found == "none: torch 2.8.0+cpu sees no device, but launch counted 2 on each node (site made up)"
    assert "such as that of the site's modules (module load torch)" in wrong.remedy
    assert "train.device=cpu" in wrong.remedy
    hides = found(counted, hidden="CUDA_VISIBLE_DEVICES=")
    assert (hides.state, hides.found.partition(":")[0]) == (
        "warning",
        "CUDA_VISIBLE_DEVICES= hides the devices from the ranks",
    )
    none = found(replace(plan, job=replace(JOB, devices=(0, 0))))
    assert (none.state, none.found) == ("ok", "none: the ranks run on CPUs")


@pytest.mark.parametrize(("library", "state"), [("MPICH Version: 5.0.2", "warning"), ("", "ok")])
def test_mpi_is_called_unused_only_where_there_is_none(plan: LaunchPlan, library: str, state: str) -> None:
    lines = [{**rank, "mpi_size": None, "mpi_unused": library} for rank in ranks()]
    (finding,) = (finding for finding in doctor.of_ranks(plan, lines, 0, "") if finding.check == "MPI")
    assert finding.state == state
    assert ("not used" in finding.found) == (not library)
    assert ("srun does not start MPICH Version: 5.0.2" in finding.found) == bool(library)


def test_ranks_that_do_not_answer(plan: LaunchPlan) -> None:
    (finding,) = doctor.of_ranks(plan, ranks()[:3], 1, "line\nsrun: error: n2: task 3: Killed\n")
    assert finding.state == "wrong"
    assert "3 of 4 ranks answered, missing ranks [3]; exit status 1" in finding.found
    assert "task 3: Killed" in finding.found


def test_a_rank_that_cannot_identify_itself(plan: LaunchPlan) -> None:
    lost = {"host": "b", "rank": "3", "problems": ["the variables contradict"], "cores": 1, "devices": 0}
    findings = doctor.of_ranks(plan, [*ranks()[:3], lost], 0, "")
    assert [finding.found for finding in findings if finding.state == "wrong"] == ["the variables contradict"]


def test_what_this_process_sees(plan: LaunchPlan, tmp_path: Path) -> None:
    findings = doctor.of_machine(plan, {"PMI_RANK": "0", "TMPDIR": str(tmp_path / "none")})
    by_check = {finding.check: finding for finding in findings}
    assert by_check["variables"].state == "warning"
    assert "unset PMI_RANK" in by_check["variables"].remedy
    assert doctor.of_machine(plan, {"PALS_PMI": "pmix"})[2].state == "ok"  # an option, which users export
    assert by_check["TMPDIR"].state == "wrong"
    assert by_check["run directory"].state == "ok"
    long = tmp_path / ("x" * 80)
    long.mkdir()
    assert "too long" in doctor.of_machine(plan, {"TMPDIR": str(long)})[-1].found
    assert doctor.of_machine(replace(plan, env={**plan.env, "TMPDIR": "/tmp"}), {})[-1].state == "ok"


@pytest.mark.parametrize(
    ("site", "env", "state", "found"),
    [
        (Site("far", internet=False), {}, "ok", "not reachable from compute nodes of far"),
        (Site("far", internet=False), {"WANDB_MODE": "online"}, "warning", "but WANDB_MODE=online"),
        (Site("near", proxies={"https_proxy": "http://p:1"}), {}, "ok", "through the site's proxies (https_proxy)"),
        (Site("near", proxies={"https_proxy": "http://p:1"}), {"https_proxy": ""}, "warning", "https_proxy is empty"),
    ],
    ids=["none", "none, but W&B is to be online", "by proxies", "a proxy that is taken away"],
)
def test_the_way_to_the_internet(tmp_path: Path, site: Site, env: dict[str, str], state: str, found: str) -> None:
    options = Options(np=4, command=("probe",))
    decided = Decided("1-aa", Identity("R"), 12345, str(tmp_path), "/launches", "/s", "/venv/bin", "a")
    site = replace(site, scheduler="slurm")
    plan = build(JOB, options, decide_ranks(options, JOB), LAUNCHERS["srun"]("srun"), decided, env, site)
    (finding,) = (f for f in doctor.of_machine(plan, env, site) if f.check == "internet")
    assert finding.state == state
    assert found in finding.found
    assert bool(finding.remedy) == (state == "warning")


def test_a_job_whose_launcher_is_missing(tmp_path: Path) -> None:
    """--info printed nothing but a line of 500 characters."""
    (tmp_path / "nodes").write_text("x3209c0s19b0n0\n")
    env = {**os.environ, "PBS_JOBID": "640002.polaris-pbs-01", "PBS_NODEFILE": f"{tmp_path}/nodes", "PATH": "/usr/bin"}

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "wordrun.launch", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    info, doctor_says, refused = launch("--info"), launch("--doctor", "--json"), launch("true")
    assert info.returncode == 0, info.stderr
    rows = {line.split()[0]: line.split()[1] for line in info.stdout.splitlines() if not line.startswith(" ")}
    assert {name: rows[name] for name in ("hosts", "cores", "devices", "ranks")} == {
        "hosts": "x3209c0s19b0n0",
        "cores": "64",
        "devices": "4",
        "ranks": "4",
    }
    why = [
        "no mpiexec of pals: none next to this Python or in PATH",
        "  nothing at /opt/cray/pals/default/bin/mpiexec, /opt/cray/pals/*/bin/mpiexec",
        "  remedy: module load cray-pals",
    ]
    lines = [line for line in info.stdout.splitlines() if "passed over" not in line]
    assert lines[-3:] == [f"launcher: {why[0]}", *why[1:]]
    assert refused.returncode == 2
    lines = [line for line in refused.stderr.splitlines() if "passed over" not in line]
    assert lines == [f"launch: {line}" for line in [*why, "more: docs/launch.md#in-a-slurm-or-pbs-job"]]
    assert doctor_says.returncode == 1
    (finding,) = json.loads(doctor_says.stdout)
    assert (finding["check"], finding["state"], finding["remedy"]) == ("launcher", "wrong", "module load cray-pals")
    assert finding["found"].startswith(why[0])


def test_a_way_to_the_internet_that_nobody_has_tried(tmp_path: Path) -> None:
    """Neither the doctor nor --info says that there is one."""
    site = Site("near", scheduler="slurm")
    options = Options(np=4, command=("probe",))
    decided = Decided("1-aa", Identity("R"), 12345, str(tmp_path), "/s", "/venv/bin", "a")
    ranks = decide_ranks(options, JOB)
    plan = build(JOB, options, ranks, LAUNCHERS["srun"]("srun"), decided, {}, site)
    assert "internet" not in [finding.check for finding in doctor.of_machine(plan, {}, site)]
    assert json.loads(dry_run.info(JOB, site, ranks, plan.launcher, as_json=True))["internet"] is None


def test_devices_are_shared_where_there_are_too_few(plan: LaunchPlan) -> None:
    few = replace(plan, job=replace(JOB, devices=(1, 1)))
    assert not [f for f in doctor.of_ranks(few, ranks(device=0), 0, "") if f.state != "ok"]


@pytest.mark.parametrize(
    ("local_rank", "count", "env", "index", "device"),
    [
        (5, 4, {}, 1, 1),
        (1, 4, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, 1, 2),
        (3, 1, {"ROCR_VISIBLE_DEVICES": "4"}, 0, 4),
        (3, 1, {}, 0, None),
        (0, 2, {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, 0, None),
    ],
)
def test_which_device_a_rank_has(local_rank: int, count: int, env: dict[str, str], index: int, device: Any) -> None:
    assert probe.device_of(local_rank, count, env) == {"index": index, "device": device}


def test_ranks_that_meet_and_one_that_cannot_be_reached() -> None:
    port = free_port()
    worlds = [World(rank=rank, size=4, local_rank=rank % 2, local_size=2) for rank in range(4)]
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda world: probe.meet(world, "127.0.0.1", port), worlds)] == [("", [])] * 4
        served = pool.submit(probe.meet, worlds[0], "127.0.0.1", port)
        with socket.create_server(("", 0)) as closed:
            nobody = closed.getsockname()[1]
        for said in (b"", b"\n", b"0 0 n\n", b"0 4 n\n", b"0 -1 n\n", b"65536 1 n\n", b"\xff\0\n", b"x" * 60_000):
            with connected(port) as stranger, contextlib.suppress(OSError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        for rank, back in ((1, 0), (2, nobody), (3, 0)):
            with connected(port), connected(port) as caller:  # the first one is silent
                caller.sendall(f"{back} {rank} n{rank}\n".encode())
                assert caller.recv(1) == b""
        problem, (unreached,) = served.result()
    assert problem == ""
    assert unreached.startswith(f"rank 2 on n2 (127.0.0.1 port {nobody}): ")


def connected(port: int) -> socket.socket:
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_the_sum_over_all_ranks_is_in_training_s_own_group() -> None:
    assert probe.all_reduce() == ""  # a group of this process alone


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MEETING_S", 0.3)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen" in probe.meet(World(rank=0, size=2), "127.0.0.1", port)[0]
    assert "only 0 of 1 other ranks" in probe.meet(World(rank=0, size=2), "127.0.0.1", port)[0]
    assert "cannot reach MASTER_ADDR=127.0.0.1" in probe.meet(World(rank=1, size=2), "127.0.0.1", port)[0]
