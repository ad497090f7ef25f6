"""SLURM's short forms of host lists and counts."""

from __future__ import annotations

import pytest

from wordrun.common.errors import ConfigError
from wordrun.common.slurm import expand_counts, expand_hosts
from wordrun.dist.rendezvous import meeting_point
from wordrun.dist.world import World

HOST_LISTS = {
    "nid[001234-001236,001300]": "nid001234 nid001235 nid001236 nid001300",
    "jwb[0001-0003]": "jwb0001 jwb0002 jwb0003",
    "bask-pg0309u05a,bask-pg0309u06a": "bask-pg0309u05a bask-pg0309u06a",
    "bask-pg0309u[05a,06a]": "bask-pg0309u05a bask-pg0309u06a",
    "nid[00001,00011-00012]": "nid00001 nid00011 nid00012",
    "gpu-[9-11]": "gpu-9 gpu-10 gpu-11",
    "r[1-2]n[08-10]": "r1n08 r1n09 r1n10 r2n08 r2n09 r2n10",
    "a[1-2]-ib,login1,b[3]x": "a1-ib a2-ib login1 b3x",
    "one": "one",
}


@pytest.mark.parametrize(("text", "hosts"), HOST_LISTS.items())
def test_host_lists_are_expanded(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-", "a]1", "a[3-1]", "a[]", "a[1,]", "a[x-y]", "a[[1]]", "a b"])
def test_an_invalid_host_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_X"):
        expand_hosts(text, "SLURM_X")


def test_a_long_list_takes_linear_time() -> None:
    assert len(expand_hosts(",".join(f"n{i}x" for i in range(100_000)))) == 100_000
    assert len(expand_hosts("n[000001-100000]")) == 100_000


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("4", [4]),
        ("4(x2),3", [4, 4, 3]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("72(x2),36", [72, 72, 36]),
        ("1, 2", [1, 2]),
    ],
)
def test_slurm_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "4(x)", "a", "4(x2", "-1", "4,,3"])
def test_what_are_no_counts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="list of counts"):
        expand_counts(text)


def test_where_the_tasks_of_a_bare_srun_meet() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "jwb[0065,0070]"}
    tasks = World(size=2, nodes=2, launcher="srun")
    address, port = meeting_point(tasks, step)
    assert address == "jwb0065"
    assert meeting_point(tasks, step) == (address, port)
    assert meeting_point(tasks, {**step, "SLURM_STEP_ID": "1"})[1] != port
    assert meeting_point(tasks, {**step, "SLURM_STEP_NODELIST": "jwb0070"})[0] == "127.0.0.1"
    # What a job script has exported, as the sites' own examples do, is a decision.
    assert meeting_point(tasks, {**step, "MASTER_ADDR": "jwb0065i", "MASTER_PORT": "6000"}) == ("jwb0065i", "6000")
    assert meeting_point(tasks, {**step, "MASTER_ADDR": "jwb0065i"}) == ("jwb0065i", port)
    assert meeting_point(World(launcher="torchrun"), step) == ("", "")
