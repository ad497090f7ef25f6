"""launch in PBS jobs of Polaris and Aurora, with a stand-in for PALS's mpiexec around real ranks.

The stand-in takes the options that PALS has and refuses others, gives ranks PALS's variables, and never says how many
ranks there are. The job's two hosts are this machine twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

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
    ranks.append(subprocess.Popen(args.command, env={{**os.environ, **{{k: str(v) for k, v in told.items()}}}}))
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
sys.exit(max(rank.wait() for rank in ranks))
"""
JOBS = {
    "polaris": ("640002.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", ["x3209c0s19b0n0.hsn.cm.polaris.alcf.anl.gov",
                "x3209c0s25b0n0.hsn.cm.polaris.alcf.anl.gov"]),
    "aurora": ("8824786.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
               ["x4114c1s7b0n0.hostmgmt2.cm.aurora.alcf.anl.gov", "x4114c1s7b1n0.hostmgmt2.cm.aurora.alcf.anl.gov"]),
}  # fmt: skip
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


def test_ranks_know_their_places_without_a_size_from_pals(job: str, command: Command) -> None:
    done = command(*LAUNCH, sys.executable, "-c", DISCOVER)
    assert done.returncode == 0, done.stderr
    assert sorted(line[line.index("[rank") :] for line in done.stdout.splitlines()) == [
        f"[rank={rank}/3][local_rank={rank % 2}/1][node={rank // 2}/1]" for rank in range(4)
    ]


def test_a_plain_torch_script(job: str, command: Command) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "plain_ddp.py"
    done = command(*LAUNCH, sys.executable, script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failing_rank_is_named(job: str, command: Command) -> None:
    done = command(*LAUNCH, "sh", "-c", "[ $RANK = 3 ] && exit 5; exec sleep 30")
    assert done.returncode == 5, done.stderr
    assert "launch: rank 3 on " in done.stderr


def test_names_that_do_not_resolve_are_refused_before_anything_starts(
    job: str, command: Command, tmp_path: Path
) -> None:
    done = command("launch", "--ppn", "2", "true")
    assert done.returncode == 2
    assert f"PBS_NODEFILE {tmp_path}/nodefile: the first host of the job does not resolve here" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_mpich_that_comes_first_in_path_is_passed_over(
    job: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{tmp_path}/cray/pals/bin:/usr/bin:/bin")
    done = command("launch", "--dry-run", "true")
    assert done.returncode == 0, done.stderr
    assert f"# launcher: pals {tmp_path}/cray/pals/bin/mpiexec" in done.stdout
    assert f"# site: {job} (recognised)" in done.stdout
