"""Jobs on the sites: recorded and composed environments to the one command that is right there.

The environments stand in for machines that tests cannot reach; what is in them comes from the sites' documentation
and from recordings.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from wordrun.common import network
from wordrun.common.errors import ConfigError
from wordrun.launch import address, site_files
from wordrun.launch.job import Job, LocalHost
from wordrun.launch.launchers import LAUNCHERS, choose
from wordrun.launch.launchers.base import RANK_ENV
from wordrun.launch.launchers.pals import cpu_binding
from wordrun.launch.options import Options
from wordrun.launch.plan import LaunchPlan, build
from wordrun.launch.ranks import decide_ranks
from wordrun.launch.request import Decided, Identity
from wordrun.launch.schedulers import SCHEDULERS, find_job
from wordrun.launch.site import UNKNOWN, Site
from wordrun.launch.site_files import SHAPES

Env = Mapping[str, str]
RUN = "/p/outputs/launches/R"
COMMAND = ("python", "-m", "wordrun", "train.backend=DDP")
POLARIS = ["x3209c0s19b0n0.hsn.cm.polaris.alcf.anl.gov", "x3209c0s25b0n0.hsn.cm.polaris.alcf.anl.gov"]
HALVES = "list:24-27:16-19:8-11:0-3:28-31:20-23:12-15:4-7"
AURORA = ["x4114c1s7b0n0.hostmgmt2.cm.aurora.alcf.anl.gov", "x4114c1s7b1n0.hostmgmt2.cm.aurora.alcf.anl.gov"]
# Cores 0 and 52 are the system's, and the last ones of each socket oneCCL's.
ONE_DEVICE_EACH = ":".join(f"{low}-{low + 3}" for low in (4, 8, 12, 16, 20, 24, 56, 60, 64, 68, 72, 76))


def slurm(nodes: str, cpus: str, **more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "955500", "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": cpus, **more}


class Cluster:
    """A made-up machine in front of launch's pure functions."""

    def __init__(self, folder: Path) -> None:
        self.nodefile = folder / "nodefile"

    def pbs(self, server: str, hosts: list[str], **more: str) -> dict[str, str]:
        self.nodefile.write_text("".join(f"{host}\n" for host in hosts))
        return {"PBS_JOBID": f"640002.{server}", "PBS_NODEFILE": str(self.nodefile), "PBS_QUEUE": "debug", **more}

    def job(self, env: Env, here: str, devices: int = 0, cores: int = 64, **asked: Any) -> tuple[Job, Site]:
        found, _ = site_files.find(asked.get("site"), here, env)
        machine = LocalHost(here, cores, "affinity", devices, "devices")
        return find_job(asked.get("scheduler"), env, machine, found, asked.get("hostfile")), found

    def plan(self, env: Env, here: str, launcher: str, devices: int = 0, cores: int = 64, **asked: Any) -> LaunchPlan:
        job, found = self.job(env, here, devices, cores, **asked)
        options = Options(**{"command": COMMAND, **asked})
        ranks = decide_ranks(options, job)
        master = address.decide(job.hosts, found, here, lambda name: "10.0.0.1")[0]
        decided = Decided("1-aa", Identity("R"), 12345, "/p", "/p/outputs/launches", "/p/s", "/venv/bin", master)
        return build(job, options, ranks, LAUNCHERS[launcher](launcher), decided, env, found)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def words(plan: LaunchPlan) -> str:
    """Return the command line up to the rank's own words."""
    assert plan.argv[-len(COMMAND) - 2 :] == ("/bin/sh", RANK_ENV, *COMMAND)
    return " ".join(plan.argv[: -len(COMMAND) - 2])


STEP = "--export=ALL --kill-on-bad-exit=1 --wait=60 --input=0 --disable-status --job-name=wordrun-1-aa"


def test_polaris(cluster: Cluster) -> None:
    env = cluster.pbs("polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", POLARIS, OMP_NUM_THREADS="64", NCPUS="64")
    plan = cluster.plan(env, "x3209c0s19b0n0", "pals", devices=4)
    assert words(plan) == (
        f"pals --envall --line-buffer -n 8 --ppn 4 --hostfile {cluster.nodefile} --cpu-bind list:24-31:16-23:8-15:0-7"
    )
    assert plan.site.name == "polaris"
    assert plan.env["MASTER_ADDR"] == "x3209c0s19b0n0.hsn.cm.polaris.alcf.anl.gov"
    assert plan.env["WORDRUN_WORLD_SIZE"] == "8"
    assert plan.env["OMP_NUM_THREADS"] == "8"  # the cores it is bound to, and not PBS's 64
    assert plan.env["TMPDIR"] == "/tmp"
    assert plan.env["https_proxy"] == "http://proxy.alcf.anl.gov:3128"
    assert not [name for name in plan.env if name.startswith("PMI")]


# Scheduler, variable, its value in a job of the id 8824786.srv, and who has set it.
EXPORTS = [
    ("pbs", "TMPDIR", "/var/tmp/pbs.8824786.srv", True),
    ("pbs", "TMPDIR", "/var/tmp/pbs.8824786[4].srv", True),
    ("pbs", "TMPDIR", "/local/scratch/pbs.8824786", True),
    ("pbs", "TMPDIR", "/tmp", False),
    ("pbs", "TMPDIR", "/home/u/pbs.tmp", False),
    ("pbs", "TMPDIR", "/var/tmp/pbs.8824786.srv/mine", False),
    ("pbs", "OMP_NUM_THREADS", "64", True),
    ("pbs", "OMP_NUM_THREADS", "3", False),
    ("pbs", "http_proxy", "http://mine", False),
    ("slurm", "TMPDIR", "/tmp", True),
    ("slurm", "TMPDIR", "/scratch/u/8824786", False),
    ("slurm", "CUDA_VISIBLE_DEVICES", "0,1", True),
    ("slurm", "OMP_NUM_THREADS", "64", False),
]


@pytest.mark.parametrize(("scheduler", "name", "value", "own"), EXPORTS)
def test_what_a_scheduler_sets_is_not_the_users(scheduler: str, name: str, value: str, own: bool) -> None:
    env = {"NCPUS": "64", "PBS_JOBID": "8824786.srv", "SLURM_JOB_ID": "8824786", name: value}
    assert SCHEDULERS[scheduler].has_set(name, env) == own


@pytest.mark.parametrize(("tmpdir", "reaches"), [("/var/tmp/pbs.640002.polaris-pbs-01", "/tmp"), ("/scratch/me", None)])
def test_pbs_own_tmpdir_gives_way_to_the_sites(cluster: Cluster, tmpdir: str, reaches: str | None) -> None:
    env = cluster.pbs("polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", POLARIS, TMPDIR=tmpdir)
    assert cluster.plan(env, "x3209c0s19b0n0", "pals", devices=4).env.get("TMPDIR") == reaches


def test_a_node_file_that_repeats_its_hosts(cluster: Cluster) -> None:
    repeated = [host for host in POLARIS for _ in range(4)]
    env = cluster.pbs("polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", repeated)
    plan = cluster.plan(env, "x3209c0s19b0n0", "pals", devices=4)
    assert plan.hosts == tuple(POLARIS)
    assert f"--hostfile {RUN}.hosts" in words(plan)
    assert plan.files[f"{RUN}.hosts"] == "".join(f"{host}\n" for host in POLARIS)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"np": 1}, "-n 1 --ppn 1 --hostfile {own} --cpu-bind list:24-31"),
        ({"np": 2}, "-n 2 --ppn 2 --hostfile {own} --cpu-bind list:24-31:16-23"),
        ({"np": 2, "nodes": 2}, "-n 2 --ppn 1 --hostfile {job} --cpu-bind list:24-31"),
        ({"np": 6}, "-n 6 --ppn 4 --hostfile {job} --cpu-bind list:24-31:16-23:8-15:0-7"),
        ({"ppn": 8, "nodes": 1}, "-n 8 --ppn 8 --hostfile {own} --cpu-bind {halves}"),
        ({"cpu_bind": "none"}, "-n 8 --ppn 4 --hostfile {job} --cpu-bind none"),
    ],
    ids=str,
)
def test_parts_of_a_polaris_job(cluster: Cluster, asked: dict[str, Any], expected: str) -> None:
    env = cluster.pbs("polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", POLARIS)
    plan = cluster.plan(env, "x3209c0s19b0n0", "pals", devices=4, **asked)
    expected = expected.format(own=f"{RUN}.hosts", job=cluster.nodefile, halves=HALVES)
    assert words(plan) == f"pals --envall --line-buffer {expected}"


def test_aurora(cluster: Cluster) -> None:
    env = cluster.pbs("aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov", AURORA, PALS_PMI="pmix")
    plan = cluster.plan(env, "x4114c1s7b0n0", "pals", cores=208)
    assert plan.environment(env)["PALS_PMI"] == "pmix"  # an option of mpiexec that its users export
    assert words(plan) == (
        f"pals --envall --line-buffer -n 24 --ppn 12 --hostfile {cluster.nodefile} --cpu-bind list:{ONE_DEVICE_EACH}"
    )
    expected = {
        "CCL_PROCESS_LAUNCHER": "pmix",
        "CCL_ATL_TRANSPORT": "mpi",
        "CCL_KVS_MODE": "mpi",
        "FI_MR_CACHE_MONITOR": "userfaultfd",
        "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
        "MASTER_ADDR": "x4114c1s7b0n0.hsn.cm.aurora.alcf.anl.gov",
        "WORDRUN_WORLD_SIZE": "24",
    }
    assert {name: plan.env[name] for name in expected} == expected
    assert "oneCCL" in plan.reasons["CCL_PROCESS_LAUNCHER"]


def test_sunspot(cluster: Cluster) -> None:
    """Aurora's command line; the names of its nodes are those in the node file, for want of a fact."""
    hosts = [f"x1921c{n}s2b0n0.hostmgmt2000.cm.americas.sgi.com" for n in (0, 4)]
    plan = cluster.plan(cluster.pbs("sunspot-pbs-0001", hosts), "x1921c0s2b0n0", "pals", cores=208)
    assert words(plan) == (
        f"pals --envall --line-buffer -n 24 --ppn 12 --hostfile {cluster.nodefile} --cpu-bind list:{ONE_DEVICE_EACH}"
    )
    expected = {
        "CCL_PROCESS_LAUNCHER": "pmix",
        "CCL_ATL_TRANSPORT": "mpi",
        "CCL_KVS_MODE": "mpi",
        "FI_MR_CACHE_MONITOR": "userfaultfd",
        "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
        "TMPDIR": "/tmp",
        "https_proxy": "http://proxy.alcf.anl.gov:3128",
        "MASTER_ADDR": "x1921c0s2b0n0",
        "WORDRUN_WORLD_SIZE": "24",
        "OMP_NUM_THREADS": "4",
        "WORDRUN_DEVICES": "12 (site sunspot)",
    }
    assert {name: plan.env[name] for name in expected} == expected
    assert plan.site.name == "sunspot"


def test_what_the_user_exported_wins_over_the_site(cluster: Cluster) -> None:
    env = cluster.pbs("aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov", AURORA, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")
    assert "ZE_FLAT_DEVICE_HIERARCHY" not in cluster.plan(env, "x4114c1s7b0n0", "pals").env


def test_crux(cluster: Cluster) -> None:
    hosts = ["x1000c0s0b1n1", "x1000c0s0b1n0"]
    env = cluster.pbs("crux-pbs-0001.head.cm.crux.alcf.anl.gov", hosts)
    plan = cluster.plan(env, hosts[0], "pals", cores=256)
    assert plan.site.name == "crux"
    assert "WORDRUN_DEVICES" not in plan.env
    assert words(plan) == (
        f"pals --envall --line-buffer -n 16 --ppn 8 --hostfile {cluster.nodefile} --depth 16 --cpu-bind depth"
    )


def test_sophia_counts_the_gpus_that_it_holds(cluster: Cluster) -> None:
    env = cluster.pbs("sophia-pbs-01.lab.alcf.anl.gov", ["sophia-gpu-07"] * 4)
    plan = cluster.plan(env, "sophia-gpu-07", "openmpi", devices=4)
    text = words(plan)
    assert text.startswith(f"openmpi -n 4 -N 4 --hostfile {RUN}.hosts --bind-to none -x ")
    assert plan.files[f"{RUN}.hosts"] == "sophia-gpu-07 slots=4\n"
    for name in ("PATH", "LD_LIBRARY_PATH", "WORDRUN_WORLD_SIZE", "MASTER_ADDR", "https_proxy"):
        assert f"-x {name}" in text


@pytest.mark.parametrize(
    "more", [{"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}, {}], ids=str
)
def test_perlmutter(cluster: Cluster, more: dict[str, str]) -> None:
    env = slurm("nid[001234-001235]", "128(x2)", NERSC_HOST="perlmutter", CUDA_VISIBLE_DEVICES="0,1,2,3", **more)
    plan = cluster.plan(env, "nid001234", "srun")
    assert words(plan) == (
        "srun -u -N 2 -n 8 --ntasks-per-node=4 -c 32 --gpus-per-node=4 --gpu-bind=none --cpu-bind=cores " + STEP
    )
    assert plan.env["CUDA_VISIBLE_DEVICES"] == "3,2,1,0"
    assert plan.env["SRUN_CPUS_PER_TASK"] == "32"
    assert plan.env["WORDRUN_PTY"] == "1"
    assert plan.env["MASTER_ADDR"] == "nid001234"


def test_frontier(cluster: Cluster) -> None:
    env = slurm("frontier[00001-00002]", "56(x2)", LMOD_SYSTEM_NAME="frontier")
    plan = cluster.plan(env, "frontier00001", "srun")
    assert words(plan) == ("srun -u -N 2 -n 16 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest " + STEP)
    assert plan.env["NCCL_SOCKET_IFNAME"] == "hsn0"
    assert plan.env["MIOPEN_USER_DB_PATH"].startswith("/tmp/")


def test_juwels(cluster: Cluster) -> None:
    env = slurm("jwb[0065,0070]", "96(x2)", SYSTEMNAME="juwelsbooster", SLURM_GPUS_ON_NODE="4")
    plan = cluster.plan(env, "jwb0065.juwels", "srun")
    assert words(plan) == (
        "srun -u -N 2 -n 8 --ntasks-per-node=4 -c 24 --gres=gpu:4 --gpu-bind=none --cpu-bind=none " + STEP
    )
    assert plan.env["MASTER_ADDR"] == "jwb0065i"
    assert plan.env["GLOO_SOCKET_IFNAME"] == "ib0"
    assert plan.env["WANDB_MODE"] == "offline"


def test_baskerville(cluster: Cluster) -> None:
    env = slurm(
        "bask-pg0308u06a,bask-pg0309u11a",
        "36(x2)",
        SLURM_JOB_PARTITION="baskerville-a100_40",
        SLURM_MEM_PER_CPU="1",
        SLURM_TRES_PER_TASK="cpu:8",
        SLURM_CPUS_PER_GPU="36",
    )
    plan = cluster.plan(env, "bask-pg0308u06a.cluster.baskerville.ac.uk", "srun")
    assert plan.hosts == ("bask-pg0308u06a", "bask-pg0309u11a")
    assert words(plan) == "srun -u -N 2 -n 8 --ntasks-per-node=4 -c 9 --gpus-per-node=4 --gpu-bind=none " + STEP
    assert {"SLURM_MEM_PER_CPU", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_GPU"} <= {*plan.env_unset}


def test_engaging_after_a_requeue(cluster: Cluster) -> None:
    env = slurm(
        "node2804", "16", SLURM_JOB_PARTITION="mit_preemptable", SLURM_GPUS_ON_NODE="2", SLURM_RESTART_COUNT="1"
    )
    plan = cluster.plan(env, "node2804", "srun")
    assert words(plan) == "srun -u -N 1 -n 2 --ntasks-per-node=2 -c 8 --gres=gpu:2 --gpu-bind=none " + STEP
    assert plan.job.restarts == 1


def test_an_unknown_cluster_with_uneven_nodes(cluster: Cluster) -> None:
    env = slurm("n[1-2]", "3,1", SLURM_NTASKS="4", SLURM_TASKS_PER_NODE="3,1")
    plan = cluster.plan(env, "login", "srun")
    assert plan.site == UNKNOWN
    assert words(plan) == "srun -u -N 2 -n 4 -c 1 --distribution=arbitrary " + STEP
    assert plan.env["SLURM_HOSTFILE"] == f"{RUN}.hosts"
    assert plan.files[f"{RUN}.hosts"] == "n1\nn1\nn1\nn2\n"
    part = cluster.plan(env, "login", "srun", np=2)
    assert words(part) == "srun -u -N 1 -n 2 --ntasks-per-node=2 -c 1 --nodelist=n1 " + STEP


def test_ten_thousand_hosts_fit_into_what_linux_starts(cluster: Cluster) -> None:
    nodes = [f"x4{i:05d}c1s7b0n0.hostmgmt2.cm.aurora.alcf.anl.gov" for i in range(10_624)]
    pbs = cluster.plan(cluster.pbs("aurora-pbs-0001", nodes), nodes[0], "pals")
    in_slurm = cluster.plan(slurm("n[000001-020000]", "8(x20000)"), "n000001", "srun", nodes=19_000)
    assert f"--nodelist={RUN}.hosts" in in_slurm.argv
    assert in_slurm.files[f"{RUN}.hosts"].count("\n") == 19_000
    for plan in (pbs, in_slurm):
        assert max(map(len, [*plan.argv, *plan.env.values()])) < 128 * 1024
    done = subprocess.run(["true", *pbs.argv], env={**pbs.env, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0


def test_an_unknown_pbs_cluster_with_hydra(cluster: Cluster) -> None:
    plan = cluster.plan(cluster.pbs("server", ["a", "b"]), "a", "hydra", devices=2)
    assert words(plan) == f"hydra -n 4 -f {RUN}.hosts -ppn 2"
    assert plan.files[f"{RUN}.hosts"] == "a:2\nb:2\n"


def test_a_hostfile_of_the_users(cluster: Cluster, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# mine\nb slots=3\na:1\n")
    plan = cluster.plan({}, "laptop", "hydra", hostfile=str(hosts))
    assert words(plan) == f"hydra -n 4 -f {RUN}.hosts"
    assert plan.files[f"{RUN}.hosts"] == "b:3\na:1\n"
    in_slurm = cluster.plan(slurm("[a-b],c".replace("[a-b]", "a,b"), "4(x3)"), "c", "srun", hostfile=str(hosts))
    assert words(in_slurm) == "srun -u -N 2 -n 4 -c 1 --distribution=arbitrary " + STEP
    # In the job's order, in which srun numbers the nodes.
    assert in_slurm.files[in_slurm.env["SLURM_HOSTFILE"]] == "a\nb\nb\nb\n"
    assert in_slurm.hosts == ("a", "b")


def test_gpus_that_a_login_nodes_shell_does_not_show(cluster: Cluster) -> None:
    for text in ("4", "a100:4"):
        env = slurm("n[1-2]", "64(x2)", SLURM_GPUS_PER_NODE=text)
        assert words(cluster.plan(env, "login", "srun")).startswith(
            "srun -u -N 2 -n 8 --ntasks-per-node=4 -c 16 --gpu-bind=none "
        )


def test_hosts_that_pbs_names_many_times(cluster: Cluster) -> None:
    hosts = [f"h{number:04d}" for number in range(5000) for _ in range(4)]
    job, _ = cluster.job(cluster.pbs("server", hosts), "h0000")
    assert (len(job.hosts), set(job.slots)) == (5000, {4})


def test_open_mpi_hands_on_what_the_user_exported(cluster: Cluster) -> None:
    env = cluster.pbs("sophia-pbs-01", ["sophia-gpu-01", "sophia-gpu-02"])
    mine = {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "https_proxy": "http://mine", "WANDB_MODE": "disabled"}
    others = {"HOSTNAME": "login1", "PWD": "/", "OMPI_MCA_btl": "tcp", "RANK": "3"}  # of a host, of mpirun, stale
    text = words(cluster.plan({**env, **mine, **others, "ANY_NAME": "7"}, "sophia-gpu-01", "openmpi"))
    assert all(f" -x {name} " in text for name in [*mine, "ANY_NAME"])
    assert not any(f" -x {name} " in text for name in others)


def test_an_interactive_shell_of_salloc_is_not_a_rank(cluster: Cluster) -> None:
    env = slurm(
        "nid001096",
        "128",
        SLURM_STEP_ID="4294967290",
        SLURM_STEP_NUM_TASKS="1",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_JOB_NAME="interactive",
        SLURM_GPUS_ON_NODE="4",
        NERSC_HOST="perlmutter",
    )
    assert words(cluster.plan(env, "nid001096", "srun")).startswith("srun -u -N 1 -n 4 --ntasks-per-node=4 -c 32 ")


def test_an_array_job(cluster: Cluster) -> None:
    env = cluster.pbs("polaris-pbs-01", POLARIS, PBS_ARRAY_INDEX="4")
    job, _ = cluster.job({**env, "PBS_JOBID": "640002[4].polaris-pbs-01"}, "x3209c0s19b0n0")
    assert (job.id, job.queue) == ("640002[4].polaris-pbs-01", "debug")


BAD_JOBS: dict[str, tuple[dict[str, str], list[str]]] = {
    "no node file named": ({"PBS_JOBID": "1"}, ["PBS_NODEFILE is not set", "--hostfile"]),
    "node file missing": ({"PBS_JOBID": "1", "PBS_NODEFILE": "/none"}, ["PBS_NODEFILE=/none", "No such file"]),
    "node file empty": ({"PBS_JOBID": "1", "PBS_NODEFILE": "/dev/null"}, ["PBS_NODEFILE=/dev/null is empty"]),
    "node file with something else": (
        {"PBS_JOBID": "1", "PBS_NODEFILE": __file__},
        ["should be the name of one host", __file__],
    ),
    "inside a rank": (
        {"PBS_JOBID": "1", "PBS_NODEFILE": "/none", "PALS_RANKID": "3"},
        ["rank 3 of a launch in PBS job 1", "PALS_RANKID"],
    ),
    "node list does not parse": (slurm("n[1-", "4"), ["SLURM_JOB_NODELIST", "n[1-"]),
    "no node list": ({"SLURM_JOB_ID": "7"}, ["SLURM_JOB_NODELIST is not set"]),
    "counts do not parse": (slurm("n1", "4x2"), ["SLURM_JOB_CPUS_PER_NODE", "4x2"]),
    "too few counts": (slurm("n[1-3]", "4,4"), ["counts 2 nodes", "names 3"]),
    "heterogeneous": (slurm("n1", "4", SLURM_HET_SIZE="2"), ["SLURM_HET_SIZE=2", "heterogeneous"]),
    "inside a step": (slurm("n1", "4", SLURM_STEP_ID="5", SLURM_PROCID="1"), ["task 1 of step 5", "--scheduler none"]),
}


@pytest.mark.parametrize(("env", "says"), BAD_JOBS.values(), ids=BAD_JOBS)
def test_a_job_that_cannot_be_understood(cluster: Cluster, env: dict[str, str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster.job(env, "n1")
    assert all(word in str(caught.value) for word in says), caught.value


def test_more_counts_than_nodes_are_cut_with_a_note(cluster: Cluster) -> None:
    job, _ = cluster.job(slurm("n[1-2]", "4(x3)"), "n1")
    assert job.cores == (4, 4)
    assert "counts more than" in job.notes[0]


def test_a_hostfile_with_a_host_outside_the_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1\nn9\n")
    with pytest.raises(ConfigError, match=r"n9 not in SLURM job 955500, which has n1, n2"):
        cluster.job(slurm("n[1-2]", "4(x2)"), "n1", hostfile=str(tmp_path / "hosts"))


# Sites

HOSTS = {
    "x3209c0s19b0n0": "polaris",
    "polaris-login-02": "polaris",
    "x4407c6s2b0n0": "aurora",
    "aurora-uan-0009": "aurora",
    "x1921c0s2b0n0.hostmgmt2000.cm.americas.sgi.com": "sunspot",
    "x1000c0s0b1n1": "crux",
    "sophia-gpu-03": "sophia",
    "frontier00001": "frontier",
    "jwb0065.juwels": "juwels_booster",
    "bask-pg0308u24a.cluster.baskerville.ac.uk": "baskerville",
    "orcd-login001": "engaging",
    "nid001234": None,
    "login01": None,
    "laptop": None,
}


@pytest.mark.parametrize(("host", "name"), HOSTS.items())
def test_sites_are_recognised_by_host(host: str, name: str | None) -> None:
    found, _ = site_files.find(None, host, {"HOME": "/nobody"})
    assert found.name == (name or "")


def test_every_site_file_is_right_for_any_number_of_ranks() -> None:
    paths = list(site_files.site_files({"HOME": "/nobody"}).values())
    assert len(paths) >= 10
    for path in paths:
        known = site_files.load(path)
        assert known == site_files.load(path, trusted=True)
        assert known.description
        assert known.scheduler
        assert known.launcher
        for ppn in range(1, (known.devices or 8) + 1):
            binding = cpu_binding(known, ppn)
            assert not binding.startswith("list:") or binding.count(":") == ppn


def test_a_users_own_site_needs_no_python(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "wordrun" / "sites"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "description: mine\nrecognise: {env: {SLURM_CLUSTER_NAME: mine}}\nscheduler: slurm\nlauncher: srun\n"
        "devices: 2\n"
        "srun_args: ['--gpus-per-node={devices}']\nmaster_addr: '{host}-ib'\nenv: {NCCL_IB_HCA: [mlx5, the fast one]}\n"
    )
    env = slurm("n[1-2]", "8(x2)", SLURM_CLUSTER_NAME="mine", XDG_CONFIG_HOME=str(tmp_path / "config"))
    plan = cluster.plan(env, "n1", "srun")
    assert words(plan) == "srun -u -N 2 -n 4 --ntasks-per-node=2 -c 4 --gpus-per-node=2 " + STEP
    assert plan.env["MASTER_ADDR"] == "n1-ib"
    assert plan.reasons["NCCL_IB_HCA"] == "site mine: the fast one"
    by_file = cluster.plan(slurm("n1", "8"), "n1", "srun", site=str(folder / "mine.yaml"))
    assert by_file.site.name == "mine"


# Lines of a site file that is right otherwise, and what is said of them.
BAD_VALUES = {
    "devises: 4": ["unknown key 'devises'; did you mean 'devices'?"],
    "devices: four": ["devices: 'four' should be a whole number"],
    "devices: -1": ["devices: -1 should be a whole number, at least 0"],
    "cores: 0": ["cores: 0 should be a whole number, at least 1"],
    "ranks_per_node: 0": ["ranks_per_node: 0 should be a whole number, at least 1"],
    "launcher: mpich": ["launcher: 'mpich' should be one of pals, hydra, openmpi, srun"],
    "env: {A: 1}": ["env.A: 1 should be [value, reason]"],
    "env: {1: [a, b]}": ["env: the name 1 should be text"],
    "env: {A-B: [a, b]}": ["env: 'A-B' should be the name of a variable"],
    "env: {A: ['{device}', b]}": ["env.A", "{device}, which is not a placeholder; did you mean '{devices}'?"],
    "unset: {A: }": ["unset.A: None should be text"],
    "recognise: {host: x}": ["recognise: unknown key 'host'; did you mean 'hosts'?"],
    "recognise: {hosts: 'x['}": ["recognise.hosts: 'x[' is not a regular expression"],
    "recognise: {hosts: [x]}": ["recognise.hosts: ['x'] should be text"],
    "recognise: {env: {A: 'x['}}": ["recognise.env.A: 'x[' is not a regular expression"],
    "recognise: {env: [A]}": ["recognise.env: ['A'] should be keys and values"],
    "recognise: {env: foo}": ["recognise.env: 'foo' should be keys and values"],
    "cores_near_device: [a]": ["cores_near_device: 'a' should be cores such as 8-15"],
    "cores_near_device: [8-1]": ["cores_near_device: '8-1' should name the lower core first"],
    "{devices: 4, cores_near_device: [0-7, 8-15]}": ["cores_near_device: 2 entries for devices: 4"],
    "{launcher: srun, srun_args: ['--gpus={device}']}": ["srun_args: '--gpus={device}' has", "mean '{devices}'?"],
    "{launcher: srun, srun_args: ['--gpus={devices']}": ["has {devices, which is not a placeholder"],
    "srun_args: [--exact]": ["srun_args requires launcher: srun, and the file says no launcher"],
    "{launcher: srun, pals_binding: depth}": ["pals_binding requires launcher: pals", "says launcher: srun"],
    "{launcher: srun, scheduler: pbs}": ["launcher: srun needs scheduler: slurm", "says scheduler: pbs"],
    "master_addr: '{hst}.x'": ["master_addr: '{hst}.x' has {hst}", "did you mean '{host}'?"],
    "master_addr: node1": ["master_addr: 'node1' should contain {host}"],
    "proxies: {http_proxy: 8080}": ["proxies.http_proxy: 8080 should be text"],
    "modules: [module load a: b]": ["modules: {'module load a': 'b'} should be one line of text"],
    "queues: {debug: }": ["queues.debug: None should be keys and values ({} for none)"],
    "queues: {debug: {hour: 1}}": ["queues.debug: unknown key 'hour'; did you mean 'hours'?"],
    "queues: {debug: {hours: one}}": ["queues.debug.hours: 'one' should be a number above 0"],
    "queues: {debug: {nodes: 4}}": ["queues.debug.nodes: 4 should be [least, most] nodes"],
    "queues: {debug: {nodes: [4, 1]}}": ["queues.debug.nodes: [4, 1] should be [least, most] nodes"],
    "submit: {filesytems: home, acount_needed: true}": [
        "unknown key 'filesytems'; did you mean 'filesystems'?",
        "unknown key 'acount_needed'",
    ],
    "submit: {queue_needed: 1}": ["submit.queue_needed: 1 should be true or false"],
    "submit: {queue_option: qos}": ["submit.queue_option: 'qos' should be an option of sbatch"],
    "submit: {directives: --exclusive}": ["submit.directives: '--exclusive' should be a list, such as [--exclusive]"],
    "submit: {directives: ['--gres=gpu:{n}']}": ["submit.directives: '--gres=gpu:{n}' has {n}", "use {devices}"],
    "{scheduler: pbs, submit: {directives: ['-l n={devices}']}}": ["pbs has no placeholders"],
    "{devises: 4, devices: four}": ["unknown key 'devises'", "should be a whole number"],
    "{devises: 4, cores: 0, submit: {a: 1}}": ["unknown key 'devises'", "cores: 0", "submit: unknown key 'a'"],
}
BAD_FILES = {
    "scheduler: lsf": [": scheduler: 'lsf' should be one of pbs, slurm"],
    "devices: 4": [": scheduler is missing: it should be one of pbs, slurm"],
    "- a": [" should contain keys and values"],
    "a: [b,\nc: d": ["in the block from line 1"],
    "description: our: cluster": [", line 1, column 17: mapping values are not allowed"],
    "description: 2024-13-45": [": month must be in 1..12"],
    "description: '\x01'": [": unacceptable character"],
}


def check_refused(path: Path, text: str, says: list[str]) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        site_files.find(str(path), "host", {})
    assert all(line.startswith(f"site file {path}") for line in str(caught.value).splitlines()), caught.value
    assert all(word in str(caught.value) for word in says), caught.value


@pytest.mark.parametrize(("text", "says"), BAD_VALUES.items(), ids=BAD_VALUES)
def test_a_site_file_with_a_mistake(tmp_path: Path, text: str, says: list[str]) -> None:
    if text.startswith("{"):
        text = text if "scheduler" in text else "{scheduler: slurm, " + text[1:]
    else:
        text = f"scheduler: slurm\n{text}\n"
    check_refused(tmp_path / "mine.yaml", text, says)


@pytest.mark.parametrize(("text", "says"), BAD_FILES.items(), ids=range(len(BAD_FILES)))
def test_a_file_that_is_not_a_site(tmp_path: Path, text: str, says: list[str]) -> None:
    check_refused(tmp_path / "mine.yaml", text, says)


def test_every_key_of_a_site_is_checked() -> None:
    assert [*SHAPES] == [f.name for f in fields(Site) if f.name != "name"]


def test_braces_of_a_variables_own_stay(cluster: Cluster, tmp_path: Path) -> None:
    own = '{"a": {"devices": {devices}}, "b": "${HOME}{0}"}'
    (tmp_path / "mine.yaml").write_text(f"scheduler: slurm\ndevices: 3\nenv:\n  A: ['{own}', why]\n")
    plan = cluster.plan(slurm("n1", "8"), "n1", "srun", site=str(tmp_path / "mine.yaml"))
    assert plan.env["A"] == '{"a": {"devices": 3}, "b": "${HOME}{0}"}'


# Launchers


def program(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_a_conda_mpiexec_is_passed_over_for_pals(cluster: Cluster, tmp_path: Path) -> None:
    conda = program(tmp_path / "conda" / "bin" / "mpiexec", "HYDRA build details:")
    pals = program(tmp_path / "cray" / "pals" / "1.8" / "bin" / "mpiexec", "PALS 1.8")
    env = {**cluster.pbs("aurora-pbs-0001", AURORA), "PATH": f"{conda.parent}:{pals.parent}"}
    job, known = cluster.job(env, "x4114c1s7b0n0")
    found = choose(None, 24, env, job, known)
    assert (found.name, found.path) == ("pals", str(pals))
    assert f"passed over {conda} (hydra" in found.why
    with pytest.raises(ConfigError) as caught:
        choose(None, 24, {**env, "PATH": str(conda.parent)}, job, known)
    assert "no mpiexec of pals: none next to this Python or in PATH\n  nothing at /opt/cray/pals" in str(caught.value)
    assert "module load cray-pals" in str(caught.value)


def test_slurm_without_srun(cluster: Cluster) -> None:
    job, known = cluster.job(slurm("n[1-2]", "4(x2)"), "n1")
    with pytest.raises(ConfigError, match="no srun in PATH"):
        choose(None, 4, {"PATH": "/none"}, job, known)


# Addresses


def test_the_address_is_the_fast_networks_name_where_it_resolves() -> None:
    juwels = site_files.find("juwels_booster", "", {"HOME": "/nobody"})[0]
    names = {"jwb0065i": "10.1.1.1", "jwb0065": "10.0.0.1", "jwb0065.juwels": "10.0.0.1"}
    assert address.decide(["jwb0065"], juwels, "login", names.get)[0] == "jwb0065i"
    del names["jwb0065i"]
    assert address.decide(["jwb0065.juwels"], juwels, "login", names.get)[0] == "jwb0065.juwels"
    assert address.decide(["jwb0065"], juwels, "jwb0065.juwels", {"jwb0065.juwels": "10.0.0.1"}.get)[0] == "10.0.0.1"


def test_an_address_is_never_the_loopbacks_for_want_of_a_better_one() -> None:
    found, _, problem = address.decide(["n1", "n2"], UNKNOWN, "n1", {}.get)
    assert found == "n1"
    assert "does not resolve here (n1)" in problem
    assert address.decide(["n1", "n2"], UNKNOWN, "n1.x", {"n1.x": "127.0.1.1"}.get)[2]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What names resolve to, stubbed: two hosts whose own names are 127.0.1.1 would need two name services."""
    found = {"n1": "127.0.1.1", "n2": "192.0.2.9"}
    monkeypatch.setattr(address, "resolve", found.get)
    monkeypatch.setattr(network, "resolve", found.get)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    return found


def own_address() -> str:
    """Return this machine's address on the network of its default route; without one, skip."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.9", 9))
        except OSError:
            pytest.skip("this machine has no route to another")
        return str(route.getsockname()[0])


def test_a_loopback_address_of_the_first_host_is_replaced_by_one_that_others_reach(names: dict[str, str]) -> None:
    own = own_address()
    found, why, problem = address.of_first(["n1", "n2"], UNKNOWN, "n1")
    assert (found, problem) == (own, "")
    assert "n1 resolves to 127.0.1.1" in why
    interface = network.interface_for_gloo(["n2"])
    assert interface in {name for _, name in socket.if_nameindex()} - {"lo"}
    names["n1"] = own
    assert network.interface_for_gloo(["n2"]) == ""


def test_a_loopback_address_without_a_route_to_others_names_the_line_to_mend(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "address_towards", lambda hosts: "")
    problem = address.of_first(["n1", "n2"], UNKNOWN, "n1")[2]
    assert "line of /etc/hosts on n1 that begins with 127.0.1.1 and names n1" in problem
    names["n2"] = "127.0.0.1"  # all "hosts" are this machine
    assert address.of_first(["n1", "n2"], UNKNOWN, "n1")[::2] == ("n1", "")
