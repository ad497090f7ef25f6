"""Who am I: discovery of the rank from each launcher's recorded variables, without torch and without MPI.

F02, F04, ... number the recorded environments.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun.common.errors import UserError, WorldError
from wordrun.dist.world import World, discover

if TYPE_CHECKING:
    from conftest import Command

Env = dict[str, str]
HERE = socket.gethostname()


def environ(text: str) -> Env:
    return dict(each.split("=", 1) for each in text.split())


# F02, pmi=cray
POLARIS = environ("""
    PALS_RANKID=5 PMI_RANK=5 PALS_LOCAL_RANKID=1 PMI_LOCAL_RANK=1 PALS_LOCAL_SIZE=4
    PMI_LOCAL_SIZE=4 PMI_SIZE=8 PALS_NODEID=1 PALS_APID=a8 SLINGSHOT_DEVICES=cxi0
""")
# F04, pmi=pmix, recorded in job 8824786: no variable holds the size
AURORA = environ("""
    PALS_RANKID=0 PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=4 PALS_NODEID=0 PALS_DEPTH=1
    PALS_PMI=pmix PALS_TRANSFER=0 PMIX_RANK=0 PMIX_NAMESPACE=a8824786
""")
# F14, recorded
SALLOC_SHELL = environ("""
    SLURM_JOB_ID=321 SLURM_JOB_NAME=interactive SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1
    SLURM_TASKS_PER_NODE=8 SLURM_LOCALID=0 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_NTASKS=8
""")
SLURM_TASK = environ("""
    SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=7 SLURM_STEP_TASKS_PER_NODE=3(x2),1
    SLURM_PROCID=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=7
""")
ONE_TASK = {
    **SLURM_TASK,
    **environ("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"),
}
# F22
OPENMPI = environ("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3
    OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=3 PMIX_RANK=3 PMIX_NAMESPACE=12@1
""")
# F23
HYDRA = environ("""
    PMI_RANK=1 PMI_SIZE=6 PMI_FD=9 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3
""")
HYDRA_PORT = {"PMI_PORT": "node01:41233", "PMI_ID": "1"}  # F24: neither rank nor size
INTEL = {**HYDRA, "I_MPI_PIN": "0", "I_MPI_MPIRUN": "mpirun"}  # F25
MVAPICH = environ("""
    MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=0
    MV2_COMM_WORLD_LOCAL_SIZE=2
""")
TORCHRUN = environ("""
    RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1
    TORCHELASTIC_RUN_ID=none MASTER_ADDR=localhost MASTER_PORT=29500
""")
LOCAL = environ("WORDRUN_LAUNCHER=local RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=0")

# rank, size, local_rank, local_size, node, nodes, launcher
Place = tuple[int, int, int, int, int, int, str]
RECORDED: dict[str, tuple[Env, Place]] = {
    "F02 Polaris": (POLARIS, (5, 8, 1, 4, 1, 2, "pals")),
    "F04 Aurora under launch": ({**AURORA, "WORDRUN_WORLD_SIZE": "8"}, (0, 8, 0, 4, 0, 2, "pals")),
    "F14 salloc shell": (SALLOC_SHELL, (0, 1, 0, 1, 0, 1, "none")),
    "batch script": ({**SALLOC_SHELL, "SLURM_STEP_ID": "4294967291"}, (0, 1, 0, 1, 0, 1, "none")),
    "job without a step": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (0, 1, 0, 1, 0, 1, "none")),
    "srun task": (SLURM_TASK, (4, 7, 1, 3, 1, 3, "srun")),
    "srun task on the small node": (
        {**SLURM_TASK, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
        (6, 7, 0, 1, 2, 3, "srun"),
    ),
    "F22 OpenMPI": (OPENMPI, (3, 4, 3, 4, 0, 1, "openmpi")),
    "F23 Hydra": (HYDRA, (1, 6, 1, 3, 0, 2, "hydra")),
    "F24 Hydra in port mode": (HYDRA_PORT, (0, 1, 0, 1, 0, 1, "mpi")),
    "F25 Intel MPI": (INTEL, (1, 6, 1, 3, 0, 2, "hydra")),
    "MVAPICH": (MVAPICH, (2, 4, 0, 2, 1, 2, "mvapich")),
    "torchrun": (TORCHRUN, (3, 8, 1, 2, 1, 4, "torchrun")),
    "F26 torchrun inside srun": ({**SLURM_TASK, "SLURM_PROCID": "0", **TORCHRUN}, (3, 8, 1, 2, 1, 4, "torchrun")),
    "launch without MPI": (LOCAL, (0, 1, 0, 1, 0, 1, "local")),
    "launch's mpiexec inside an srun step": (
        {**SLURM_TASK, **HYDRA, "WORDRUN_LAUNCHER": "hydra", "WORDRUN_LAUNCH_ID": "1-aa", "WORDRUN_WORLD_SIZE": "6"},
        (1, 6, 1, 3, 0, 2, "hydra"),
    ),
    "srun with pmi2": (
        {**SLURM_TASK, "PMI_RANK": "4", "PMI_SIZE": "7", "PMI_FD": "10"},
        (4, 7, 1, 3, 1, 3, "srun"),
    ),
    "srun with cray_shasta": (
        {**SLURM_TASK, "PALS_RANKID": "4", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "4", "PMI_SIZE": "7"},
        (4, 7, 1, 3, 1, 3, "srun"),
    ),
    "a bare srun in a script that exports its rank": (
        {**SLURM_TASK, "RANK": "4", "WORLD_SIZE": "7"},
        (4, 7, 1, 3, 1, 3, "srun"),
    ),
    "srun inside PALS": ({**SLURM_TASK, **AURORA, "PMIX_RANK": ""}, (4, 7, 1, 3, 1, 3, "srun")),
    "mpiexec inside an interactive step": ({**ONE_TASK, **HYDRA}, (1, 6, 1, 3, 0, 2, "hydra")),
    "mpiexec inside an interactive step with pmi2": (
        {**ONE_TASK, "PMI_RANK": "0", "PMI_SIZE": "1", **OPENMPI},
        (3, 4, 3, 4, 0, 1, "openmpi"),
    ),
    "mpiexec inside salloc, whose daemons srun starts": (
        {
            **SLURM_TASK,
            **HYDRA,
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        (1, 6, 1, 3, 0, 2, "hydra"),
    ),
    "srun inside a single process of mpiexec": (
        {**SLURM_TASK, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        (4, 7, 1, 3, 1, 3, "srun"),
    ),
    "mpiexec of MPICH's gforker, which numbers no local ranks": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"},
        (0, 1, 0, 1, 0, 1, "mpi"),
    ),
    "F30 laptop": ({}, (0, 1, 0, 1, 0, 1, "none")),
    "stale MASTER_ADDR": ({"MASTER_ADDR": "gone", "MASTER_PORT": "1", "RANK": "3"}, (0, 1, 0, 1, 0, 1, "none")),
}


@pytest.mark.parametrize(("env", "place"), RECORDED.values(), ids=RECORDED)
def test_each_launcher_is_recognised(env: Env, place: Place) -> None:
    world = discover(env)
    found = (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes, world.launcher)
    assert found == place


@pytest.mark.parametrize(("env", "place"), RECORDED.values(), ids=RECORDED)
def test_the_source_names_the_variables_that_decided(env: Env, place: Place) -> None:
    if place[-1] == "none":
        assert "none of the known launchers" in discover(env).source
    else:
        assert any(name in discover(env).source for name in env)


@pytest.mark.parametrize("repeats", [1, 4])
def test_aurora_counts_the_hosts_of_the_node_file_once_each(tmp_path: Path, repeats: int) -> None:
    hosts = [f"x4114c1s{n}b0n0.hostmgmt2.cm.aurora.alcf.anl.gov" for n in (6, 7)]
    nodefile = tmp_path / "nodes"
    nodefile.write_text("".join(f"{host}\n" * repeats for host in hosts))
    world = discover({**AURORA, "PBS_NODEFILE": str(nodefile)})
    assert (world.size, world.local_size, world.nodes) == (8, 4, 2)
    assert "PBS_NODEFILE" in world.source


@pytest.mark.parametrize("nodefile", [None, "/does/not/exist"])
def test_aurora_without_any_size_is_an_error_and_never_one_rank(nodefile: str | None) -> None:
    env = {**AURORA, "PBS_NODEFILE": nodefile} if nodefile else AURORA
    with pytest.raises(WorldError, match=r"pals sets rank 0 but no world size.*launch.*WORDRUN_WORLD_SIZE"):
        discover(env)


def test_launch_tells_the_hosts() -> None:
    world = discover({**POLARIS, "WORDRUN_HOSTS": "x3001,x3002", "WORDRUN_WORLD_SIZE": "8", "WORDRUN_LAUNCHER": "pals"})
    assert world.hosts == ("x3001", "x3002")
    assert world.host == "x3002"


def test_a_single_process_is_on_this_host() -> None:
    world = discover({})
    assert world.hosts == (HERE,)
    assert world.host == HERE


def test_what_a_user_sees_counts_from_zero_to_the_last() -> None:
    assert str(World(rank=1, size=2, local_rank=1, local_size=2, device="cuda:1")) == (
        "[cuda:1] [rank 1 of 2] [local rank 1 of 2] [node 0 of 1]"
    )


WRONG = {
    "rank beyond the size": ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "4"}, ["openmpi", "rank 4 of 4", "launch"]),
    "local rank beyond the node": ({**HYDRA, "MPI_LOCALRANKID": "3"}, ["hydra", "local rank 3 of 3"]),
    "more on the node than in all": ({**MVAPICH, "MV2_COMM_WORLD_LOCAL_SIZE": "9"}, ["mvapich", "of 9"]),
    "no local size": ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, ["OMPI_COMM_WORLD_LOCAL_SIZE", "whole number"]),
    "no number": ({**HYDRA, "PMI_RANK": "None"}, ["PMI_RANK='None'", "whole number"]),
    "torchrun beyond the size": ({**TORCHRUN, "RANK": "8"}, ["torchrun", "rank 8 of 8"]),
    "another launcher inside": (
        {**HYDRA, "WORDRUN_LAUNCHER": "hydra", "WORDRUN_WORLD_SIZE": "2"},
        ["launch started 2", "PMI_SIZE=6", "another launcher"],
    ),
    "mpiexec inside a step of several tasks on a node": (
        {**SLURM_TASK, **HYDRA},
        [
            "srun says SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=7",
            "hydra says PMI_RANK=1 PMI_SIZE=6 MPI_LOCALRANKID=1",
            "launch --scheduler none",
        ],
    ),
    "PALS without a local rank": (
        {"PALS_RANKID": "13", "PALS_LOCAL_SIZE": "12", "PBS_NODEFILE": "/dev/null"},
        ["pals says PALS_RANKID=13, but PALS_LOCAL_RANKID, PMI_SIZE are not set", "`launch`"],
    ),
    "a part of PALS beside another rank": (
        {"PALS_RANKID": "13", "PALS_LOCAL_SIZE": "12", "RANK": "3", "WORLD_SIZE": "4"},
        ["pals says PALS_RANKID=13 and the environment says RANK=3 WORLD_SIZE=4", "unset these variables"],
    ),
    "PALS beside another rank": (
        {**POLARIS, "RANK": "3", "WORLD_SIZE": "4"},
        ["pals says PALS_RANKID=5 PMI_SIZE=8", "the environment says RANK=3 WORLD_SIZE=4"],
    ),
    "PALS beside a size of 1": (
        {**AURORA, "PMI_SIZE": "1"},
        ["rank 0 of 1 (PALS_RANKID, PMI_SIZE", "local rank 0 of 4"],
    ),
    "a rank of PALS beside a rank of PMI": (
        {**AURORA, "WORDRUN_WORLD_SIZE": "8", "PMI_RANK": "2"},
        ["pals says PALS_RANKID=0", "hydra says PMI_RANK=2"],
    ),
    "a rank of no launcher": ({"RANK": "3", "WORLD_SIZE": "4"}, ["RANK=3 WORLD_SIZE=4, but LOCAL_RANK is not set"]),
    "a part of Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "1"},
        ["OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not set"],
    ),
    "the same rank, another local rank": (
        {**POLARIS, **OPENMPI, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"},
        ["PALS_LOCAL_RANKID=1", "OMPI_COMM_WORLD_LOCAL_RANK=3"],
    ),
    "mpiexec inside a rank of launch's srun": (
        {**SLURM_TASK, **HYDRA, "WORDRUN_LAUNCHER": "srun", "WORDRUN_LAUNCH_ID": "1-aa"},
        ["srun says SLURM_PROCID=4", "hydra says PMI_RANK=1"],
    ),
    "mpiexec of the same kind and size inside a rank of launch": (
        {
            **HYDRA,
            "WORDRUN_LAUNCHER": "hydra",
            "WORDRUN_LAUNCH_ID": "1-aa",
            "WORDRUN_WORLD_SIZE": "6",
            "RANK": "4",
            "WORLD_SIZE": "6",
            "LOCAL_RANK": "1",
        },
        ["hydra says PMI_RANK=1 PMI_SIZE=6", "launch says RANK=4 WORLD_SIZE=6"],
    ),
    "mpiexec inside torchrun": (
        {**TORCHRUN, **HYDRA},
        ["torchrun says RANK=3 WORLD_SIZE=8", "hydra says PMI_RANK=1 PMI_SIZE=6"],
    ),
    "unreadable counts": ({**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "3x2"}, ["SLURM_STEP_TASKS_PER_NODE='3x2'"]),
    "unreadable size by launch": ({**AURORA, "WORDRUN_WORLD_SIZE": "many"}, ["WORDRUN_WORLD_SIZE='many'"]),
    "unreadable size by launch, and one by the launcher": (
        {**HYDRA, "WORDRUN_LAUNCHER": "hydra", "WORDRUN_WORLD_SIZE": "many"},
        ["WORDRUN_WORLD_SIZE='many'"],
    ),
}


@pytest.mark.parametrize(("env", "says"), WRONG.values(), ids=WRONG)
def test_contradictions_are_refused_by_name(env: Env, says: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        discover(env)
    assert [text for text in says if text not in str(caught.value)] == []


def test_a_line_on_rank_0_says_which_of_two_launchers_counts(command: Command) -> None:
    script = "import wordrun.dist; wordrun.dist.discover(); print(wordrun.dist.discover().launcher)"
    lines = [
        command(sys.executable, "-c", script, **{**ONE_TASK, **HYDRA, "PMI_RANK": rank, "MPI_LOCALRANKID": rank})
        for rank in "01"
    ]
    assert [done.stdout for done in lines] == ["hydra\n"] * 2
    assert lines[0].stderr == (
        "using: hydra says PMI_RANK=0 PMI_SIZE=6 MPI_LOCALRANKID=0. Ignored: srun says SLURM_PROCID=0 "
        "SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0, because srun started hydra, which started the ranks\n"
    )
    assert lines[1].stderr == ""


def test_discovery_needs_neither_torch_nor_mpi(command: Command) -> None:
    heavy = "{'torch', 'mpi4py', 'numpy'} & {*sys.modules}"
    script = f"import sys, wordrun.dist; wordrun.dist.discover(); print(sorted({heavy}))"
    assert command(sys.executable, "-c", script).stdout == "[]\n"
