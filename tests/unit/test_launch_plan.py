"""From job, options and launcher to the command line and the environment of the ranks."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wordrun.common.errors import ConfigError
from wordrun.common.secrets import mask, mask_words
from wordrun.launch import dry_run, record, run
from wordrun.launch.address import free_port, is_free, unresolved
from wordrun.launch.environment import is_stale, threads
from wordrun.launch.job import Job, LocalHost, count_cores, count_devices, local_host
from wordrun.launch.launchers import LAUNCHERS, choose
from wordrun.launch.launchers.base import RANK_ENV, find_command, flavour
from wordrun.launch.limits import check_crowd
from wordrun.launch.options import Options
from wordrun.launch.plan import LaunchPlan, build
from wordrun.launch.ranks import decide_ranks
from wordrun.launch.request import Decided, Identity
from wordrun.launch.schedulers import find_job

pytestmark = pytest.mark.unit

LAPTOP = Job(
    hosts=("box",),
    cores=(8,),
    devices=(0,),
    slots=(1,),
    reasons={"scheduler": "this machine", "hosts": "h", "cores": "c", "devices": "d"},
)
GPU_BOX = Job(hosts=("box",), cores=(64,), devices=(4,), slots=(4,), reasons=LAPTOP.reasons)
TWO_NODES = Job(hosts=("a", "b"), cores=(8, 8), devices=(2, 1), slots=(2, 1), scheduler="pbs", id="7")
DECIDED = Decided(
    launch_id="1-aa",
    run=Identity("20260102-030405-abcd"),
    port=12345,
    cwd="/home/u",
    folder="/home/u/outputs/launches",
    status_dir="/tmp/s",
    own_bin="/venv/bin",
    interfaces=("eth0", "lo"),
)
PATHS = {"hydra": "/opt/mpiexec", "openmpi": "/opt/mpirun", "torchrun": "/venv/bin/python", "local": ""}
HYDRA = LAUNCHERS["hydra"]("/opt/mpiexec", "test")
RANK = ["/bin/sh", RANK_ENV, "python", "x.py"]


def plan(launcher: str, *, job: Job = LAPTOP, env: Mapping[str, str] | None = None, **asked: Any) -> LaunchPlan:
    options = Options(**{"np": None if launcher == "local" else 2, "command": ("python", "x.py"), **asked})
    env = {"PATH": "/venv/bin:/usr/bin", **(env or {})}
    return build(job, options, decide_ranks(options, job), LAUNCHERS[launcher](PATHS[launcher], "test"), DECIDED, env)


def test_golden_hydra() -> None:
    assert list(plan("hydra").argv) == ["/opt/mpiexec", "-n", "2", *RANK]
    bound = plan("hydra", cpu_bind="core", launcher_args=("-prepend-rank",))
    assert list(bound.argv) == ["/opt/mpiexec", "-n", "2", "-bind-to", "core", "-prepend-rank", *RANK]


def test_hydra_stays_here_inside_a_schedulers_job() -> None:
    inside = Job(**{**vars(LAPTOP), "inside": "slurm"})
    assert list(plan("hydra", job=inside).argv)[:7] == ["/opt/mpiexec", "-n", "2", "-rmk", "user", "-launcher", "fork"]


def test_golden_openmpi() -> None:
    argv = list(plan("openmpi", env={"PYTHONUNBUFFERED": "1"}).argv)
    assert argv[:5] == ["/opt/mpirun", "-n", "2", "--bind-to", "none"]
    exported = [argv[i + 1] for i, word in enumerate(argv) if word == "-x"]
    assert exported == sorted(plan("openmpi", env={"PYTHONUNBUFFERED": "1"}).env)
    assert argv[-4:] == RANK
    assert list(plan("openmpi", np=9).argv)[5:7] == ["--map-by", "slot:OVERSUBSCRIBE"]


def crowd(words: Mapping[str, Any], memory: float | None = None, job: Job = LAPTOP) -> str:
    options = Options(**words)
    return check_crowd(options, job, decide_ranks(options, job), None if memory is None else int(memory))


def test_ranks_that_share_cores_are_announced() -> None:
    assert crowd({"np": 8}) == ""
    assert crowd({"np": 9}) == "9 ranks share 8 cores: fine for a test, slow for training"
    assert crowd({"np": 64}).startswith("64 ranks share 8 cores")
    assert crowd({"ppn": 1000, "oversubscribe": True}, memory=1e9).startswith("1000 ranks share 8 cores")
    assert crowd({}, memory=1e6) == crowd({"np": 5, "oversubscribe": True}, memory=1e6) == ""
    crowded = Job(hosts=("a", "b"), cores=(8, 8), devices=(0, 0), slots=(100, 100), scheduler="slurm")
    assert crowd({"np": 200}, job=crowded) == ""  # the scheduler has decided
    uneven = replace(crowded, slots=(2, 1), scheduler="pbs")
    assert crowd({"np": 3}, job=uneven) == crowd({"ppn": 1}, job=uneven) == ""
    note = "2 ranks on b, where the job has room for 1: they share cores, so all may be slow"
    assert crowd({"ppn": 2}, job=uneven) == note
    single = replace(crowded, slots=(1, 1), granted=(1, 1), scheduler="pbs")
    assert crowd({"ppn": 2}, job=single).startswith("2 ranks on a (and on 1 other host), where the job has room for 1")


@pytest.mark.parametrize(
    ("words", "memory", "message"),
    [
        ({"np": 65}, None, "-n 65: 65 ranks on 8 cores are more than 8 per core; -n 64 would fit, or --oversubscribe"),
        ({"ppn": 65}, 1e12, "65 ranks on 8 cores are more than 8 per core; --ppn 64 would fit"),
        ({"np": 8}, 3e9, "need about 3.2 GB of memory to import torch, and 3.0 GB are available; -n 7 would fit"),
        ({"np": 2}, 1e8, "need about 0.8 GB of memory to import torch, and 0.1 GB are available; -n 1 would fit"),
    ],
)
def test_more_ranks_than_the_machine_holds_are_refused(
    words: dict[str, int], memory: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        crowd(words, memory)


def test_golden_torchrun() -> None:
    assert list(plan("torchrun").argv) == [
        *shlex.split("""
        /venv/bin/python -m torch.distributed.run --nnodes 1 --node-rank 0
        --nproc-per-node 2 --rdzv-backend static --max-restarts 0
        --master-addr 127.0.0.1 --master-port 12345 --no-python
    """),
        *RANK,
    ]


def test_golden_local() -> None:
    found = plan("local")
    assert found.argv == ("python", "x.py")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
    }.items():
        assert found.env[name] == value


def test_environment_of_two_ranks() -> None:
    assert plan("hydra").env == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "12345",
        "WORDRUN_LAUNCHER": "hydra",
        "WORDRUN_LAUNCHER_PATH": "/opt/mpiexec",
        "WORDRUN_LAUNCH_ID": "1-aa",
        "WORDRUN_RUN_ID": "20260102-030405-abcd",
        "WORDRUN_WORLD_SIZE": "2",
        "WORDRUN_LAYOUT": "2",
        "WORDRUN_HOSTS": "box",
        "WORDRUN_LAUNCH_RECORD": "/home/u/outputs/launches/20260102-030405-abcd.json",
        "WORDRUN_STATUS_DIR": "/tmp/s",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "UCX_NET_DEVICES": "lo",
        "FI_TCP_IFACE": "lo",
        "FI_SOCKETS_IFACE": "lo",
        "HYDRA_IFACE": "lo",
        "MPIR_CVAR_NO_COLLECTIVE_FINALIZE": "1",
        "OMPI_MCA_async_mpi_finalize": "1",
        "ACCELERATE_USE_CPU": "true",
        "PL_TRAINER_DEVICES": "2",
        "PL_TRAINER_NUM_NODES": "1",
    }


def test_daemons_on_another_host_are_not_sent_to_loopback() -> None:
    assert plan("hydra").env["HYDRA_IFACE"] == "lo"
    for changed in ({"hostfile": "hosts"}, {"launcher_args": ("-hosts", "other")}):
        options = Options(np=2, command=("x",), **changed)
        found = build(LAPTOP, options, decide_ranks(options, LAPTOP), HYDRA, DECIDED, {})
        assert "HYDRA_IFACE" not in found.env


def test_what_the_user_exported_is_kept() -> None:
    assert "PL_TRAINER_NUM_NODES" not in plan("hydra", env={"PL_TRAINER_DEVICES": "1"}).env
    env = {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "", "GLOO_SOCKET_IFNAME": "eth0"}
    found = plan("hydra", env=env)
    assert not set(env) & set(found.env)
    assert found.environment(env)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "was exported" in found.reasons["OMP_NUM_THREADS"]


def test_env_wins() -> None:
    asked = (("OMP_NUM_THREADS", "7"), ("MASTER_ADDR", "10.0.0.1"), ("OMP_NUM_THREADS", "5"))
    options = Options(np=2, command=("x",), env=asked)
    found = build(LAPTOP, options, decide_ranks(options, LAPTOP), HYDRA, DECIDED, {"OMP_NUM_THREADS": "3"})
    assert found.environment({"MASTER_ADDR": "old"})["MASTER_ADDR"] == "10.0.0.1"
    assert found.env["OMP_NUM_THREADS"] == "5"
    assert found.reasons["OMP_NUM_THREADS"] == "--env"


def test_own_python_comes_into_path() -> None:
    found = plan("hydra", env={"PATH": "/usr/bin"})
    assert found.env["PATH"] == "/venv/bin:/usr/bin"
    assert "python" in found.reasons["PATH"]
    assert "PATH" not in plan("hydra").env


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(8, 1, "8"), (8, 3, "2"), (2, 4, "1")])
def test_threads(cores: int, ranks: int, expected: str) -> None:
    job = replace(LAPTOP, cores=(cores,))
    assert plan("hydra", job=job, np=ranks).env["OMP_NUM_THREADS"] == expected


def test_threads_that_were_exported_are_kept() -> None:
    in_pbs = replace(LAPTOP, scheduler="pbs")
    assert threads(4, LAPTOP, {"OMP_NUM_THREADS": "9", "NCPUS": "9"})[0] is None
    assert threads(4, in_pbs, {"OMP_NUM_THREADS": "9", "NCPUS": "64"})[0] is None
    # PBS exports all threads of the node as both.
    assert threads(4, in_pbs, {"OMP_NUM_THREADS": "64", "NCPUS": "64"})[0] == "4"


GRANTS: list[tuple[dict[str, str], int, int, int | None, str]] = [
    # Variables of the job, cores by affinity or cgroup, ranks, OMP_NUM_THREADS (None: as exported), and what decides.
    ({"PBS_JOBID": "1", "NCPUS": "1", "OMP_NUM_THREADS": "1"}, 8, 1, 1, "NCPUS"),
    ({"PBS_JOBID": "1", "NCPUS": "6", "OMP_NUM_THREADS": "6"}, 8, 2, 3, "NCPUS"),
    ({"PBS_JOBID": "1", "NCPUS": "6"}, 4, 2, 2, "affinity"),
    ({"PBS_JOBID": "1", "NCPUS": "8", "OMP_NUM_THREADS": "3"}, 8, 1, None, "exported"),  # by the user, or ompthreads=3
    ({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "2"}, 8, 1, 2, "SLURM_JOB_CPUS_PER_NODE"),
    ({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_CPUS_ON_NODE": "2"}, 8, 1, 2, "SLURM_CPUS_ON_NODE"),
    (
        {"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "64", "SLURM_CPUS_PER_TASK": "3", "SLURM_TASKS_PER_NODE": "2"},
        8,
        2,
        3,
        "SLURM_CPUS_PER_TASK",
    ),
    (
        {"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "4"},
        8,
        1,
        8,
        "",  # one rank in the place of four tasks
    ),
]


@pytest.mark.parametrize(("env", "cores", "ranks", "threads", "why"), GRANTS)
@pytest.mark.parametrize("inside", [False, True], ids=["the job's", "--scheduler none"])
def test_threads_are_bounded_by_what_the_scheduler_granted(
    tmp_path: Path, env: dict[str, str], cores: int, ranks: int, threads: int | None, why: str, inside: bool
) -> None:
    (tmp_path / "nodes").write_text("box\n")
    env = {**env, "PBS_NODEFILE": str(tmp_path / "nodes"), "SLURM_JOB_NODELIST": "box", "PATH": ""}
    host = LocalHost("box", cores, "the CPU affinity of this process", 0, "none")
    found = plan("hydra", job=find_job("none" if inside else None, env, host), np=ranks, env=env)
    if not inside or why != "SLURM_JOB_CPUS_PER_NODE":  # which may be those of other hosts
        assert found.env.get("OMP_NUM_THREADS") == (str(threads) if threads else None)
        assert why in found.reasons["OMP_NUM_THREADS"]


def test_stale_variables_are_removed() -> None:
    stale = shlex.split("""
        RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK ROLE_NAME
        TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK PMI_RANK PMI_FD PMIX_RANK PALS_RANKID
        PALS_LOCAL_SIZE PALS_HOSTLIST MPI_LOCALRANKID MPI_LOCALNRANKS MASTER_ADDR MASTER_PORT
        WORDRUN_LAUNCH_ID WORDRUN_STATUS_DIR
    """)
    kept = ["WORDRUN_DATA_HOME", "WANDB_API_KEY", "OMP_NUM_THREADS", "RANKING", "SLURM_JOB_ID", "OMPI_MCA_btl"]
    kept += ["PALS_PMI", "PALS_TRANSFER", "PALS_CPU_BIND", "PALS_NRANKS"]  # options of its mpiexec
    assert all(is_stale(name) for name in stale)
    assert not any(is_stale(name) for name in kept)
    env = dict.fromkeys([*stale, *kept], "outer")
    child = plan("hydra", env=env).environment(env)
    assert not [name for name in child if is_stale(name) and child[name] == "outer"]
    assert all(child[name] == "outer" for name in kept)


@pytest.mark.parametrize(
    ("asked", "job", "layout"),
    [
        ({}, LAPTOP, (1, 1, 1)),
        ({}, GPU_BOX, (4, 1, 4)),
        ({"np": 3}, LAPTOP, (3, 1, 3)),
        ({"ppn": 3}, GPU_BOX, (3, 1, 3)),
        ({"nodes": 1}, GPU_BOX, (4, 1, 4)),
        ({"np": 2, "nodes": 1}, GPU_BOX, (2, 1, 2)),
        ({"np": 2, "ppn": 2}, LAPTOP, (2, 1, 2)),
        ({"np": 2, "ppn": 2, "nodes": 1}, LAPTOP, (2, 1, 2)),
        ({}, TWO_NODES, (3, 2, 2)),
        ({"ppn": 4}, TWO_NODES, (8, 2, 4)),
        ({"np": 4, "ppn": 4}, TWO_NODES, (4, 1, 4)),
        ({"ppn": 3}, TWO_NODES, (6, 2, 3)),
        ({"np": 1}, TWO_NODES, (1, 1, 1)),
        ({"np": 2}, TWO_NODES, (2, 1, 2)),
        ({"np": 2, "nodes": 2}, TWO_NODES, (2, 2, 1)),
        ({"np": 3, "nodes": 2}, TWO_NODES, (3, 2, 2)),
        ({"nodes": 1}, TWO_NODES, (2, 1, 2)),
    ],
)
def test_any_two_determine_the_third(asked: dict[str, int], job: Job, layout: tuple[int, int, int]) -> None:
    ranks = decide_ranks(Options(**asked), job)
    assert (ranks.np, ranks.nodes, ranks.ppn) == layout
    assert ranks.why


@pytest.mark.parametrize(
    ("asked", "job", "fits"),
    [
        ({"np": 3, "ppn": 2}, LAPTOP, "-n 2 --ppn 2 would fit"),
        ({"np": 4, "ppn": 2}, LAPTOP, "-n 2 --ppn 2 would fit, or -n 4 without --ppn"),
        ({"nodes": 2}, LAPTOP, "-N 1, or no -N, would fit"),
        ({"np": 2, "ppn": 2, "nodes": 2}, TWO_NODES, "-n 4 --ppn 2 would fit"),
        ({"np": 5}, TWO_NODES, "3 ranks on 2 nodes (2+1); -n 3 would fit"),
        ({"np": 8}, TWO_NODES, "-n 3 would fit, or -n 8 --ppn 4 to let ranks share devices"),
        ({"np": 1, "nodes": 2}, TWO_NODES, "-N 1, or -n 2, would fit"),
        ({"ppn": 9}, TWO_NODES, "--ppn 8 would fit"),
    ],
)
def test_an_impossible_layout_is_refused_with_one_that_fits(asked: dict[str, int], job: Job, fits: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide_ranks(Options(**asked), job)
    assert fits in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("WANDB_API_KEY", True),
        ("HF_TOKEN", True),
        ("my_secret_thing", True),
        ("DB_PASSWORD", True),
        ("CREDENTIALS", True),
        ("apikey2", True),
        ("tracker.api_key", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("data.tokenizer", False),
        ("KEYBOARD", False),
        ("PATH", False),
        ("train.sample_tokens", False),
        ("data.text_key", False),
        ("my.sample_token", True),
        ("GITHUB_PAT", True),
        ("github.pat", True),
        ("DB_PASS", True),
        ("DB_PWD", True),
        ("SSH_PASSPHRASE", True),
        ("PWD", False),
        ("OLDPWD", False),
        ("COMPATIBLE", False),
        ("data.answer_key", False),
    ],
)
def test_secrets_are_hidden(name: str, hidden: bool) -> None:
    assert mask(name, "value") == ("***" if hidden else "value")
    assert mask_words([f"--{name}=value", f"+{name}=value", "value"]) == (
        [f"--{name}=***", f"+{name}=***", "value"] if hidden else [f"--{name}=value", f"+{name}=value", "value"]
    )


def test_a_failed_launch_is_continued_unless_the_run_was_complete(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/latest").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run/launch.json")
    found = plan("hydra")
    found = replace(found, env={**found.env, "WORDRUN_LAUNCH_RECORD": str(tmp_path / "link")})
    facts = {"exit_reason": "HookError: late"}
    for more, says in (({}, "to continue from the last checkpoint"), ({"complete": True}, "")):
        (tmp_path / "run/run.json").write_text(json.dumps({**facts, **more}))
        assert record.how_to_continue(found, 1).partition(":")[0] == says
    assert record.how_to_continue(found, 0) == ""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@ss@host/db", "postgresql://***@host/db"),
        ("redis://:word@host", "redis://***@host"),
        ("https://ghp_123@github.com/a", "https://***@github.com/a"),
        ("ssh://git@host/a", "ssh://git@host/a"),
        ("http://host:80/a@b", "http://host:80/a@b"),
    ],
)
def test_the_login_of_a_url_is_hidden(url: str, shown: str) -> None:
    assert mask_words([f"data.url={url}", url]) == [f"data.url={shown}", shown]
    assert mask("STORE", url) == shown


def test_dry_run_hides_secrets_and_can_be_pasted() -> None:
    options = Options(np=2, command=("sh", "-c", "exit 0", "API_KEY=hush"), env=(("HF_TOKEN", "hush"), ("A", "b c")))
    found = build(LAPTOP, options, decide_ranks(options, LAPTOP), HYDRA, DECIDED, {"RANK": "3"})
    text = dry_run.dry_run(found, as_json=False)
    assert "hush" not in text + dry_run.dry_run(found, as_json=True)
    assert "unset RANK" in text
    assert "export A='b c'  # --env" in text
    pasted = "\n".join([*text.splitlines()[:-1], 'echo "$A|$HF_TOKEN|$MASTER_PORT|${RANK-}"'])
    run = subprocess.run(["sh", "-c", pasted], env={"RANK": "3"}, capture_output=True, text=True, check=True)
    assert run.stdout == "b c|***|12345|\n"


def test_dry_run_and_info_as_json(tmp_path: Path) -> None:
    launch = str(Path(sys.prefix) / "bin" / "launch")
    run = subprocess.run(
        [launch, "--dry-run", "--json", "-n", "2", "true"], cwd=tmp_path, capture_output=True, check=True
    )
    found = json.loads(run.stdout)
    assert (found["np"], found["command"], found["cwd"]) == (2, ["true"], str(tmp_path))
    assert set(found["reasons"]) >= {"launcher", "ranks", "MASTER_PORT", "OMP_NUM_THREADS"}
    told = json.loads(subprocess.run([launch, "--info", "--json"], capture_output=True, check=True).stdout)
    assert told["cores"] == [count_cores()[0]]
    words = [launch, "--info", "--json", "--site", "juwels_booster"]
    told = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    assert told["internet"] == "not reachable from compute nodes of juwels_booster"
    table = subprocess.run([launch, "--info"], capture_output=True, text=True, check=True).stdout
    assert table.splitlines()[0].split()[:2] == ["scheduler", "none"]
    assert not list(tmp_path.iterdir())


def test_info_shows_the_time_left(tmp_path: Path) -> None:
    end = time.time() + 5000
    stub = make(tmp_path / "squeue", time.strftime("#!/bin/sh\necho %Y-%m-%dT%H:%M:%S\n", time.localtime(end)))
    stub.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "4"}
    words = [str(Path(sys.prefix) / "bin" / "launch"), "--info", "--json", "--launcher", "torchrun"]
    for more, why in (({"SLURM_JOB_END_TIME": str(int(end))}, "SLURM_JOB_END_TIME"), ({}, "squeue")):
        env = {**os.environ, **job, **more, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        told = json.loads(subprocess.run(words, capture_output=True, check=True, env=env).stdout)
        assert re.fullmatch(r"1:2\d:\d\d", told["time_left"])
        assert told["reasons"]["time_left"] == why


def test_unresolved_hosts_are_found_without_waiting_for_slow_answers() -> None:
    never = threading.Event()
    answers = {"a": lambda: False, "b": lambda: True, "slow": never.wait, "c": lambda: True}
    begin = time.monotonic()
    found = unresolved(["me.site", *answers], "me", lambda name: answers[name](), within_s=0.5)
    assert found == ["b", "c"]
    assert time.monotonic() - begin < 30
    never.set()


def make(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("value", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-aa,GPU-bb", 2), ("NoDevFiles", 0)]
)
def test_visible_devices(value: str, count: int) -> None:
    found, why = count_devices({"CUDA_VISIBLE_DEVICES": value})
    assert found == count
    assert "CUDA_VISIBLE_DEVICES" in why


def test_devices_of_the_machine(tmp_path: Path) -> None:
    assert count_devices({}, str(tmp_path))[0] == 0
    for node, gpu_id in enumerate(("0", "0", "51234", "4711")):
        make(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", gpu_id)
    assert count_devices({}, str(tmp_path))[0] == 2
    for slot in range(4):
        make(tmp_path / f"proc/driver/nvidia/gpus/0000:0{slot}:00.0/information")
    assert count_devices({}, str(tmp_path)) == (4, "/proc/driver/nvidia/gpus")
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):  # a container with two of them
        make(tmp_path / "dev" / name)
    assert count_devices({}, str(tmp_path))[0] == 2


def test_a_schedulers_job_is_used_unless_none_is_asked_for() -> None:
    env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert find_job(None, env, local_host(env)).hosts == ("n1", "n2")
    alone = find_job("none", env, local_host(env))
    assert (len(alone.hosts), alone.inside) == (1, "slurm")


def fake_mpiexec(path: Path, version: str) -> Path:
    make(path, f"#!/bin/sh\necho '{version}'\n").chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("name", "version", "kind"),
    [
        ("mpiexec", "HYDRA build details:", "hydra"),
        ("mpiexec", "Intel(R) MPI Library for Linux* OS", "hydra"),
        ("mpirun", "mpirun (Open MPI) 4.1.4", "openmpi"),
        ("mpirun", "prterun (PRRTE) 3.0.2", "openmpi"),
        ("mpiexec", "something else", ""),
        ("orterun", "", "openmpi"),
        ("mpiexec.hydra", "", "hydra"),
        ("opt/cray/pals/1.8/bin/mpiexec", "", "pals"),
    ],
)
def test_flavours(tmp_path: Path, name: str, version: str, kind: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(fake_mpiexec(tmp_path / name, version))
    assert flavour(str(link), os.environ, LAUNCHERS)[0] == kind


def test_launcher_is_chosen_with_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wordrun.launch.launchers.base.own_bin", lambda: str(tmp_path / "own"))
    env = {"PATH": f"{tmp_path}/a:{tmp_path}/b"}
    assert choose(None, 1, env, LAPTOP).name == "local"
    assert choose(None, 2, env, LAPTOP).name == "torchrun"
    fake_mpiexec(tmp_path / "a/pals/mpiexec", "")
    (tmp_path / "a/mpiexec").symlink_to(tmp_path / "a/pals/mpiexec")
    fake_mpiexec(tmp_path / "b/mpiexec", "mpirun (Open MPI) 5.0")
    found = choose(None, 2, env, LAPTOP)
    assert (found.name, found.path) == ("openmpi", f"{tmp_path}/b/mpiexec")
    assert f"passed over {tmp_path}/a/mpiexec (pals by" in found.why
    fake_mpiexec(tmp_path / "own/mpiexec", "HYDRA build details:")
    assert choose(None, 2, env, LAPTOP).path == f"{tmp_path}/own/mpiexec"  # the environment's own comes first
    assert choose("openmpi", 1, env, LAPTOP).path == f"{tmp_path}/b/mpiexec"
    with pytest.raises(ConfigError, match="no mpiexec of openmpi: none next to this Python or in PATH\n  passed over"):
        choose("openmpi", 2, {"PATH": f"{tmp_path}/a"}, LAPTOP)
    monkeypatch.setattr("wordrun.launch.launchers.torchrun.has_torch", lambda: False)
    with pytest.raises(ConfigError, match="wordrun\\[mpich\\]"):
        choose("torchrun", 2, {"PATH": ""}, LAPTOP)


def test_commands_are_found_as_a_shell_does(tmp_path: Path) -> None:
    make(tmp_path / "a/plain", "")
    runnable = make(tmp_path / "b/plain", "")
    runnable.chmod(0o755)
    path = f"{tmp_path}/a:{tmp_path}/b"
    assert find_command("plain", path)[0] == str(runnable)
    assert find_command(f"{tmp_path}/a/plain", path) == ("", f"{tmp_path}/a/plain")
    assert find_command("none", path) == ("", "")


def test_ports() -> None:
    import socket

    ports = {free_port() for _ in range(20)}
    assert all(10000 <= port < 30000 for port in ports)
    assert len(ports) > 10
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            server = socket.create_server((address, 0), family=family)
        except OSError:
            continue  # no IPv6 here
        with server:
            assert not is_free(server.getsockname()[1])


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(self: record.Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # a write names no file

    monkeypatch.setattr(record.Record, "begin", full)
    assert "WORDRUN_LAUNCH_RECORD" not in run._begin_record(plan("hydra"))[1]
    path = f"{DECIDED.folder}/{DECIDED.run.run_id}.json"
    said = f"no record of this launch: {path}: No space left on device (the disk, or your quota of it, is full)"
    assert capsys.readouterr().err.replace("\nlaunch:   ", "; ") == f"launch: {said}\n"
