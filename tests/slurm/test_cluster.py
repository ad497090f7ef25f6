"""The cluster that the other tests of this tier stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Cluster


def test_tasks_of_one_step_run_on_two_nodes(cluster: Cluster) -> None:
    got = cluster.run("salloc", "-N2", "-n4", "srun", "sh", "-c", "echo $SLURMD_NODENAME")
    assert got.returncode == 0, got.stderr
    names = got.stdout.split()
    assert len(names) == 4
    assert len(set(names)) == 2
