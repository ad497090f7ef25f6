"""What launch submits to PBS, and what it does in PBS's jobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = pytest.mark.timeout(180)

# pbs_tmrsh starts a process on another host of the job, though without the shell that ssh would start.
HYDRA = ("--launcher", "hydra", "--launcher-args", "-bootstrap rsh -bootstrap-exec ./rsh")


def submit(cluster: Cluster, *words: str) -> str:
    Path("rsh").write_text('#!/bin/sh\nhost=$1\nshift\nexec pbs_tmrsh "$host" sh -c "$*"\n')
    Path("rsh").chmod(0o755)
    done = cluster.run("launch", "--submit", "--walltime", "0:05:00", "--job-name", "test", *words)
    assert done.returncode == 0, done.stderr
    (job,) = re.findall(r"^submitted (\S+) \(site", done.stdout)
    return job


def test_a_submission_gets_its_nodes_and_keeps_its_site(cluster: Cluster, tmp_path: Path) -> None:
    """By default PBS would put both chunks on one host, and it exports a TMPDIR of its own."""
    (tmp_path / "mine.yaml").write_text("scheduler: pbs\nlauncher: hydra\nenv: {TMPDIR: [/tmp, short]}\n")
    show = "echo rank $RANK on $(hostname) with $TMPDIR and $OMP_NUM_THREADS"
    job = submit(
        cluster, "--site", "mine.yaml", "-N", "2", "--ppn", "2", "--cores", "2", *HYDRA, "--", "sh", "-c", show
    )
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends")
    assert cluster.job(job)["exec_host"] == "h1/0*2+h2/0*2"
    assert cluster.job(job)["Resource_List"]["place"] == "scatter"
    text = next(tmp_path.glob("test.o*")).read_text()
    assert "mine: " in text  # setup_job has read the file
    said = sorted(re.findall("^rank .*", text, re.MULTILINE))
    assert said == [f"rank {rank} on h{1 + rank // 2} with /tmp and 1" for rank in range(4)], text
    assert cluster.job(job)["Exit_status"] == 0, text


def test_a_cancelled_job_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """On the other host, too, and its ranks have had the time to save."""
    rank = "trap 'touch saved-$RANK; exit 75' TERM; touch ready-$RANK; sleep 61.25 & wait"
    job = submit(cluster, "-N", "2", "--ppn", "1", *HYDRA, "--", "sh", "-c", rank)
    cluster.wait(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks are ready")
    assert cluster.run("qdel", job).returncode == 0
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends")
    text = next(tmp_path.glob("test.o*")).read_text()
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"], text
    assert "submit this script again" not in text  # the user has cancelled it
    for host in ("h1", "h2"):
        cluster.wait(lambda host=host: "61.25" not in cluster.run("ps", "ax", host=host).stdout, f"{host} is clean")
