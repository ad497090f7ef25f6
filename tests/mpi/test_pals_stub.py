"""launch in PBS jobs of Polaris and Aurora, with a stand-in for PALS's mpiexec around real ranks.

The stand-in takes the options that PALS has and refuses others, gives ranks PALS's variables, and never says how many
ranks there are. The job's two hosts are this machine twice.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

STUB = """#!{python}
import argparse, os, signal, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for switch in ("--envall", "--line-buffer"):
    parser.add_argument(switch, action="store_true")
parser.add_argument("-n", type=int)
parser.add_argument("--ppn", type=int)
for option in ("--hostfile", "--cpu-bind", "--depth"):
    parser.add_argument(option)
parser.add_argument("command", nargs=argparse.REMAINDER)
args = parser.parse_args()
hosts = open(args.hostfile).read().split()
assert len(hosts) * args.ppn >= args.n, (hosts, args)
assert not [name for name in os.environ if name.startswith(("PMI", "PALS_", "MPI_LOCAL"))]
ranks = []
for rank in range(args.n):
    local, node = rank % args.ppn, rank // args.ppn
    size = min(args.ppn, args.n - node * args.ppn)
    told = dict(PALS_RANKID=rank, PALS_LOCAL_RANKID=local, PALS_LOCAL_SIZE=size, PALS_NODEID=node, PALS_APID="x",
                PALS_DEPTH=1, PALS_PMI="pmix", PALS_TRANSFER=0)
    env = {{**os.environ, **{{k: str(v) for k, v in told.items()}}}}
    ranks.append(subprocess.Popen(args.command, env=env, start_new_session=True))
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: [os.killpg(rank.pid, number) for rank in ranks if rank.poll() is None])
sys.exit(max(rank.wait() for rank in ranks))
"""
JOBS = {
    "polaris": (
        "640002.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",
        ["x3209c0s19b0n0.hsn.cm.polaris.alcf.anl.gov", "x3209c0s25b0n0.hsn.cm.polaris.alcf.anl.gov"],
    ),
    "aurora": (
        "8824786.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
        ["x4114c1s7b0n0.hostmgmt2.cm.aurora.alcf.anl.gov", "x4114c1s7b1n0.hostmgmt2.cm.aurora.alcf.anl.gov"],
    ),
}
DISCOVER = "from wordrun.dist.world import discover; import sys; sys.stdout.write(str(discover()) + chr(10))"


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put this test into a PBS job of a site, and a PALS first in PATH."""
    name: str = request.param
    number, hosts = JOBS[name]
    stub = tmp_path / "cray" / "pals" / "bin" / "mpiexec"
    stub.parent.mkdir(parents=True)
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    nodefile = tmp_path / "nodefile"
    nodefile.write_text("".join(f"{host}\n" for host in hosts))
    monkeypatch.setenv("PBS_JOBID", number)
    monkeypatch.setenv("PBS_NODEFILE", str(nodefile))
    monkeypatch.setenv("PATH", f"{stub.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return name


# The sites' names do not resolve here.
LAUNCH = ("launch", "--env", "MASTER_ADDR=127.0.0.1", "--ppn", "2")


def test_ranks_know_who_they_are_without_a_size_from_pals(job: str, command: Command) -> None:
    done = command(*LAUNCH, sys.executable, "-c", DISCOVER)
    assert done.returncode == 0, done.stderr
    assert sorted(line[line.index("[rank") :] for line in done.stdout.splitlines()) == [
        f"[rank {rank} of 4] [local rank {rank % 2} of 2] [node {rank // 2} of 2]" for rank in range(4)
    ]


@pytest.mark.parametrize("job", ["aurora"], indirect=True)
def test_a_plain_torch_script(job: str, command: Command) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "plain_ddp.py"
    done = command(*LAUNCH[:-1], "1", sys.executable, script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failing_rank_is_named(job: str, command: Command) -> None:
    done = command(*LAUNCH, "sh", "-c", "[ $RANK = 3 ] && exit 5; exec sleep 30")
    assert done.returncode == 5, done.stderr
    assert "launch: rank 3 on " in done.stderr


# What `qstat -f -F json` prints, in PBS Pro's form, with the lines that matter here.
QSTAT = """
from datetime import datetime, timedelta
import glob, json, os, sys, time
assert sys.argv[1:4] == ["-f", "-F", "json"], sys.argv
while len(glob.glob("ready-*")) < 4:
    time.sleep(0.05)
begun = datetime.now() - timedelta(minutes=59, seconds=52)
print(json.dumps({
    "timestamp": int(begun.timestamp()), "pbs_version": "2022.1.1", "pbs_server": "pbs-01",
    "Jobs": {sys.argv[4]: {
        "Job_Name": "wordrun", "job_state": "R", "queue": "debug", "qtime": begun.ctime(), "stime": begun.ctime(),
        "Resource_List": {"ncpus": 128, "nodect": 2, "place": "scatter", "select": "2", "walltime": "01:00:00"},
        "resources_used": {"walltime": "00:59:50"},
    }},
}))
"""
WAITS_FOR_USR1 = """
import os, signal, sys, time
def note(*_):
    sys.stdout.write(f"rank {os.environ['RANK']} was told\\n")
    sys.exit()
signal.signal(signal.SIGUSR1, note)
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(100)
"""


def qstat(folder: Path, text: str) -> None:
    path = folder / "cray" / "pals" / "bin" / "qstat"
    path.write_text(text)
    path.chmod(0o755)


def test_ranks_are_signalled_before_the_time_limit(job: str, command: Command, tmp_path: Path) -> None:
    """8 seconds are left once all ranks are ready, and 5 of them are asked for."""
    qstat(tmp_path, f"#!{sys.executable}{QSTAT}")
    (tmp_path / "rank.py").write_text(WAITS_FOR_USR1)
    done = command(*LAUNCH, "--walltime-margin", "5", sys.executable, tmp_path / "rank.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} was told" for rank in range(4)]
    assert "launch: the walltime ends soon" in done.stderr


def test_a_qstat_that_refuses(job: str, command: Command, tmp_path: Path) -> None:
    qstat(tmp_path, "#!/bin/sh\necho 'qstat: Unknown Job Id' >&2\nexit 153\n")
    done = command(*LAUNCH, "--walltime-margin", "5", "sleep", "1")
    assert done.returncode == 0
    assert done.stderr == (
        "launch: starting 4 ranks on 2 hosts with pals\n"
        "launch: --walltime-margin 5: cannot determine the job's end time, so ranks will not be warned\n"
    )


def test_a_qstat_that_hangs_holds_nothing_up(job: str, command: Command, tmp_path: Path) -> None:
    qstat(tmp_path, "#!/bin/sh\nexec sleep 61.75\n")
    begun = time.monotonic()
    done = command(*LAUNCH, "--walltime-margin", "5", "sh", "-c", "[ $RANK = 3 ] || exec sleep 60; exit 5")
    assert time.monotonic() - begun < 50
    assert done.returncode == 5
    assert "launch: rank 3 on " in done.stderr
    end = time.monotonic() + 30  # it is killed by the end of launch, and may take its moment
    while subprocess.run(["pgrep", "-f", "sleep 61.75"], capture_output=True).returncode == 0:
        assert time.monotonic() < end, "qstat is left"
        time.sleep(0.05)


def test_names_that_do_not_resolve_are_refused_before_anything_starts(
    job: str, command: Command, tmp_path: Path
) -> None:
    done = command("launch", "--ppn", "2", "true")
    assert done.returncode == 2
    assert f"PBS_NODEFILE {tmp_path}/nodefile: the first host of the job does not resolve here" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_host_that_cannot_be_resolved_is_named(job: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "nodefile").write_text("localhost\nnosuchhost.invalid\n")
    done = command("launch", "--ppn", "1", "true")
    assert done.returncode == 2
    assert f"PBS_NODEFILE {tmp_path}/nodefile: nosuchhost.invalid cannot be resolved here" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_mpich_that_comes_first_in_path_is_passed_over(
    job: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{tmp_path}/cray/pals/bin:/usr/bin:/bin")
    done = command("launch", "--dry-run", "true")
    assert done.returncode == 0, done.stderr
    assert f"# launcher: pals {tmp_path}/cray/pals/bin/mpiexec" in done.stdout
    assert f"# site: {job} (recognized)" in done.stdout
