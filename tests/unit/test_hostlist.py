"""SLURM's short forms of host lists and counts."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from wordrun.errors import ConfigError
from wordrun.hostlist import expand_counts, expand_hosts

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


@pytest.mark.slurm
@pytest.mark.skipif(not shutil.which("scontrol"), reason="needs scontrol: apt-get install slurm-wlm")
@pytest.mark.parametrize("text", [text for text in HOST_LISTS if "a,06a" not in text])
def test_scontrol_says_the_same(text: str) -> None:
    shown = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip(f"scontrol needs a slurm.conf: {shown.stderr.strip()}")
    assert expand_hosts(text) == tuple(shown.stdout.split())


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-", "a]1", "a[3-1]", "a[]", "a[1,]", "a[x-y]", "a[[1]]", "a b"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
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
