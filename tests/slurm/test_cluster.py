"""The cluster that the other tests of this tier stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from wordrun.common.slurm import expand_hosts

if TYPE_CHECKING:
    from conftest import Cluster


def test_tasks_of_one_step_run_on_two_nodes(cluster: Cluster) -> None:
    got = cluster.run("salloc", "-N2", "-n4", "srun", "sh", "-c", "echo $SLURMD_NODENAME")
    assert got.returncode == 0, got.stderr
    names = got.stdout.split()
    assert len(names) == 4
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    "text", ["nid[001234-001236,001300]", "u05a,u06a", "gpu-[9-11]", "login1,a[1-2]", "r[1-2]n[08-10]", "one"]
)
def test_scontrol_expands_host_lists_as_we_do(cluster: Cluster, text: str) -> None:
    assert tuple(cluster.run("scontrol", "show", "hostnames", text).stdout.split()) == expand_hosts(text)


def test_a_node_whose_daemon_has_crashed_comes_back(cluster: Cluster) -> None:
    job = cluster.start("salloc", "-wn4", "srun", "sh", "-c", "echo started; sleep 600")
    assert job.stdout
    assert job.stdout.readline() == "started\n"
    cluster.nodes["n4"].kill()
    cluster.nodes["n4"].wait()
    cluster.clear()
    assert cluster.run("srun", "-wn4", "hostname").returncode == 0
