"""``launch`` in real SLURM jobs, and wordrun under a bare srun."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Cluster

WHO = 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE node $NODE_RANK on $SLURMD_NODENAME at $MASTER_ADDR"'
SMALL = shlex.split("""
    model=nano
    data=sample tracker=jsonl train.global_batch_size=8 train.max_iters=6 train.log_interval=1
    train.eval_interval=6 train.eval_iters=2 train.sample_tokens=8 optimizer.warmup_iters=2
    model.n_layer=1 model.n_head=2 model.n_embd=32 model.block_size=32 train.dtype=fp32
""")


def batch(folder: Path, *lines: str, **options: str) -> Path:
    """Write a job script."""
    path = folder / "job.sh"
    head = [f"#SBATCH --{name.replace('_', '-')}={value}" for name, value in options.items()]
    path.write_text("\n".join(["#!/bin/bash", f"#SBATCH --output={folder}/out-%a.txt", *head, *lines, ""]))
    return path


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def record(folder: Path) -> dict[str, Any]:
    (path,) = [*folder.glob("outputs/launches/*.json"), *folder.glob("state/wordrun/launches/*.json")]
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def wait_for(job: subprocess.Popen[str], path: Path, text: str, count: int = 1, timeout: float = 90) -> None:
    """Wait until ``text`` stands ``count`` times in a file."""
    end = time.monotonic() + timeout
    while not path.exists() or path.read_text().count(text) < count:
        assert time.monotonic() < end, path.read_text() if path.exists() else f"no {path}"
        assert job.poll() is None or path.exists(), job.communicate()
        time.sleep(0.1)


def test_in_salloc_each_rank_knows_its_place(cluster: Cluster, tmp_path: Path) -> None:
    """In blocks, whatever the job's distribution is."""
    job = ("salloc", "-N2", "--ntasks-per-node=2", "--distribution=cyclic")
    got = cluster.run(*job, "launch", "-N2", "-n4", "sh", "-c", WHO)
    assert got.returncode == 0, got.stderr
    lines = sorted(got.stdout.splitlines())
    first, second = lines[0].split()[5], lines[3].split()[5]
    assert first != second
    assert lines == [
        f"{rank}/4 {rank % 2}/2 node {rank // 2} on {(first, second)[rank // 2]} at {first}" for rank in range(4)
    ]
    kept = record(tmp_path)
    assert (kept["scheduler"], kept["launcher"], kept["hosts"]) == ("slurm", "srun", [first, second])
    assert kept["exit_status"] == 0


def test_in_sbatch_with_uneven_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """And with --export=NONE, which srun would obey, too."""
    lines = (f"export PATH={Path(sys.executable).parent}:$PATH MINE=kept", f"launch sh -c '{WHO} $MINE'")
    script = batch(tmp_path, *lines, nodes="2", ntasks="4", wait_all_nodes="1", export="NONE")
    got = cluster.run("sbatch", "--wait", script)
    text = (tmp_path / "out-4294967294.txt").read_text()
    assert got.returncode == 0, text
    places = sorted(re.findall(r"(\d)/4 (\d)/(\d) node (\d)", text))
    # SLURM itself puts three tasks on the first node and one on the second.
    assert text.count(" kept\n") == 4, text
    assert places == [("0", "0", "3", "0"), ("1", "1", "3", "0"), ("2", "2", "3", "0"), ("3", "0", "1", "1")]


def test_ranks_are_where_a_hostfile_and_uneven_numbers_put_them(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n2:1\nn1:3\n")
    (tmp_path / "do").write_text(f"launch --hostfile hosts sh -c '{WHO}'; launch -N 2 -n 5 sh -c '{WHO}'\n")
    got = cluster.run("salloc", "-N2", "--nodelist=n1,n2", "--ntasks-per-node=4", "sh", "do")
    assert got.returncode == 0, got.stderr
    assert "srun: warning" not in got.stderr
    lines = sorted(got.stdout.splitlines())
    place = "{}/{} {}/{} node {} on {} at {}".format
    # In the order of the job, whatever the file's is.
    listed = [place(rank, 4, rank, 3, 0, "n1", "n1") for rank in range(3)] + [place(3, 4, 0, 1, 1, "n2", "n1")]
    spread = [place(rank, 5, rank, 4, 0, "n1", "n1") for rank in range(4)] + [place(4, 5, 0, 1, 1, "n2", "n1")]
    assert lines == sorted(listed + spread)


SHOW = """
import os, sys
size = len(sys.stdin.buffer.read())
print(os.environ["RANK"], size, os.environ.get("a.b"), os.environ.get("BASH_FUNC_f%%"))
"""


def test_rank_0_has_all_input_and_all_ranks_have_all_variables(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    python = f"launch -n 2 {sys.executable} show.py"
    sources = ["head -c 30000000 /dev/zero | ", "(sleep 1; echo one; sleep 1; echo two) | ", "yes | head -c 9999999 | "]
    lines = [f"{source}{python}" for source in [*sources, "</dev/null "]]
    lines.append("yes | launch -n 2 head -c 2")
    (tmp_path / "do").write_text("f() { :; }; export -f f\n" + "\n".join(lines))
    got = cluster.run("salloc", "-N2", "env", "a.b=c d", "bash", "do", timeout=120)
    assert got.returncode == 0, got.stderr
    ranks = [f"{rank} c d () {{  :" for size in (30000000, 8, 9999999, 0) for rank in (f"0 {size}", "1 0")]
    assert sorted(got.stdout.splitlines()) == sorted([*ranks, *["}"] * len(ranks), "y"]), got.stderr


@pytest.mark.parametrize(
    ("how", "status"), [("raise RuntimeError('mine')", 1), ("raise SystemExit(3)", 3), ("pass", 0)]
)
def test_a_rank_that_fails_does_not_wait_in_mpi_finalize(cluster: Cluster, how: str, status: int) -> None:
    """And one that ends before the others does not take them along."""
    code = f"""
import sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert comm.size == 2
if comm.rank == 0:
    comm.send("early", dest=1)
    {how}
else:
    time.sleep(1)
    print(comm.recv(source=0), flush=True)
if {status}:
    comm.barrier()
"""
    got = cluster.run("salloc", "-N2", "launch", "-n", "2", sys.executable, "-c", code, timeout=60)
    assert got.returncode == status, got.stderr
    assert got.stdout == ("" if status else "early\n")
    assert ("RuntimeError: mine" in got.stderr) == (status == 1)


@pytest.mark.forked_programs
def test_training_on_two_nodes_has_the_losses_of_one_process(cluster: Cluster, tmp_path: Path, ranks: Any) -> None:
    small = (*SMALL, "train.dtype=fp32")  # the rounding of bf16 depends on the size of the batch
    together = cluster.run(
        *shlex.split("salloc -N2 -n4 launch -N 2 -n 4"),
        sys.executable,
        "-m",
        "wordrun",
        *small,
        "model.batch_size=2",
        "hydra.run.dir=four",
        timeout=120,
    )
    assert together.returncode == 0, together.stdout + together.stderr
    alone = ranks(1, "-m", "wordrun", *small, "model.batch_size=8", "hydra.run.dir=one", under="fork")
    assert alone.returncode == 0, alone.stderr
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    run = json.loads((tmp_path / "four" / "run.json").read_text())
    assert run["world"]["size"] == 4
    assert run["world"]["nodes"] == 2
    assert together.stdout.count("rank 0 of 4 on") == 1


def test_a_message_over_mpi_arrives_while_its_sender_waits_outside_of_mpi(cluster: Cluster, tmp_path: Path) -> None:
    text = """
import time
from pathlib import Path
import numpy as np
from wordrun import dist
world = dist.identify()
from mpi4py import MPI
message = np.ones(10_000_000)  # too large to leave at once
if world.rank == 0:
    sent = MPI.COMM_WORLD.Isend(message, dest=1)
    while not Path("arrived").exists():
        time.sleep(0.01)
    sent.Wait()
else:
    MPI.COMM_WORLD.Recv(message, source=0)
    Path("arrived").touch()
"""
    (tmp_path / "send.py").write_text(text)
    got = cluster.run("salloc", "-N2", "-n2", "launch", sys.executable, "send.py")
    assert got.returncode == 0, got.stdout + got.stderr


@pytest.mark.forked_programs
def test_the_smoke_check(cluster: Cluster) -> None:
    words = ("salloc", "-N2", "-n2", "launch", sys.executable, "-m", "wordrun.test_dist")
    got = cluster.run(*words, timeout=120)
    assert got.returncode == 0, got.stdout + got.stderr
    assert len(re.findall(r"\[rank \d of 2\] \[local rank 0 of 1\] \[node \d of 2\]", got.stdout)) == 2


@pytest.mark.forked_programs
def test_bandwidths_between_nodes(cluster: Cluster, tmp_path: Path) -> None:
    words = ("salloc", "-N2", "-n4", "launch", sys.executable, "-m", "wordrun.test_dist", "--bench")
    got = cluster.run(*words, "--sizes", "4KB", "--out", str(tmp_path), timeout=120)
    assert got.returncode == 0, got.stdout + got.stderr
    found = json.loads((tmp_path / "bandwidth.json").read_text())
    kinds = {(result["group"], result["ranks"]) for result in found["results"]}
    assert kinds == {("all ranks", 4)}  # one of the nodes has a single rank
    (pair,) = found["pairs"]
    assert pair["hosts"] == found["hosts"]
    assert len(found["hosts"]) == found["nodes"] == 2
    assert pair["gb_per_s"] > 0
    assert "pairs of nodes, 4 MB: slowest" in got.stdout


@pytest.mark.parametrize("mpi", [pytest.param("none", marks=pytest.mark.forked_programs), "pmi2"])
def test_a_bare_srun(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    words = ("srun", f"--mpi={mpi}", "-N2", "-n2", sys.executable, "-m", "wordrun", *SMALL, "model.batch_size=4")
    got = cluster.run(*words, timeout=120)
    assert got.returncode == 0, got.stdout + got.stderr
    assert got.stdout.count("run directory:") == 2  # one at the start and one at the end
    (path,) = tmp_path.glob("outputs/**/run.json")
    world = json.loads(path.read_text())["world"]
    assert (world["size"], world["nodes"]) == (2, 2)


def test_under_a_bare_srun_mpi_uses_libfabric(cluster: Cluster) -> None:
    """UCX's addresses do not always fit into the lines of pmi2."""
    script = "import sys, wordrun.dist as d; d.identify(); from mpi4py import MPI; import os\n"
    script += "sys.stdout.write(f'{MPI.COMM_WORLD.size} over {os.environ[\"MPIR_CVAR_CH4_NETMOD\"]}\\n')"
    got = cluster.run("srun", "--mpi=pmi2", "-N2", "-n4", sys.executable, "-c", script)
    assert got.stdout.splitlines() == ["4 over ofi"] * 4, got.stderr


@pytest.mark.forked_programs
def test_a_bare_srun_shares_the_cores_among_the_ranks_of_a_node(cluster: Cluster) -> None:
    words = ("srun", "-N1", "-n4", "env", "-u", "OMP_NUM_THREADS", sys.executable, "-m", "wordrun", *SMALL)
    got = cluster.run(*words, "model.batch_size=2", timeout=120)
    assert got.returncode == 0, got.stdout + got.stderr
    assert "threads: 1 per rank (4 ranks on" in got.stdout


WHERE = "import sys, wordrun.dist as d; w = d.identify(); sys.stdout.write(f'{w.launcher} {w.rank} of {w.size}\\n')"


@pytest.mark.parametrize(
    "words",
    [["salloc", "-N2", "-n2", "mpiexec", "-ppn", "2"], ["srun", "-n1", "mpiexec", "-launcher", "fork"]],
    ids=["daemons started by srun", "in an interactive step"],
)
def test_a_bare_mpiexec_in_a_job(cluster: Cluster, words: list[str]) -> None:
    got = cluster.run(*words, "-n", "4", sys.executable, "-c", WHERE)
    assert sorted(got.stdout.splitlines()) == [f"hydra {rank} of 4" for rank in range(4)], got.stderr


def test_an_array_job(cluster: Cluster, tmp_path: Path) -> None:
    line = "launch -n 2 sh -c 'echo $SLURM_ARRAY_TASK_ID:$RANK:$MASTER_PORT'"
    got = cluster.run("sbatch", "--wait", batch(tmp_path, line, array="1-2", ntasks="2"))
    assert got.returncode == 0
    found = [re.findall(r"(\d):(\d):(\d+)", (tmp_path / f"out-{i}.txt").read_text()) for i in (1, 2)]
    assert [{rank for _, rank, _ in ranks} for ranks in found] == [{"0", "1"}] * 2
    assert found[0][0][2] != found[1][0][2]  # two members may share a node


@pytest.mark.parametrize(("how", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_rank_that_fails_is_named_with_its_host(cluster: Cluster, tmp_path: Path, how: str, status: int) -> None:
    rank = tmp_path / "rank.sh"
    rank.write_text(f'[ "$RANK" = 3 ] && {{ echo $SLURMD_NODENAME > where; echo ouch >&2; {how}; }}; exec sleep 600')
    got = cluster.run("salloc", "-N2", "-n4", "launch", "sh", rank)
    assert got.returncode == status, got.stderr
    host = (tmp_path / "where").read_text().strip()
    ending = "ended with exit status 7" if status == 7 else "was killed by SIGKILL"
    # Its last line, once: what srun and the other ranks' shells say is not shown.
    said = [line for line in got.stderr.splitlines() if not line.startswith("salloc: ")]
    assert any(line.startswith(f"launch: rank 3 on {host} {ending}") for line in said)
    assert [line for line in said if not line.startswith("launch: ")] == ["ouch"]
    assert record(tmp_path)["exit_status"] == status


@pytest.mark.parametrize("to", [">/dev/full", ">&-", "2>/dev/full"])
def test_output_that_cannot_be_written_is_a_failure(cluster: Cluster, tmp_path: Path, to: str) -> None:
    got = cluster.run("salloc", "-N2", "sh", "-c", f"launch -n 2 sh -c 'echo much >&{1 + (to[0] == '2')}' {to}")
    assert got.returncode == 1
    assert ("launch: cannot write to stdout: " in got.stderr) == (to[0] == ">")
    assert record(tmp_path)["exit_status"] == 1


def test_a_rank_without_a_folder_in_common_reports_through_srun(cluster: Cluster, tmp_path: Path) -> None:
    code = "[ $RANK = 1 ] || sleep 2; exit $((3 * (RANK == 0)))"
    for launcher_args in ([], ["--launcher-args", "--label"]):
        words = ["launch", "-n", "2", "--env", "WORDRUN_STATUS_DIR=/nonexistent", *launcher_args]
        assert cluster.run("salloc", "-N2", *words, "true").returncode == 0
        got = cluster.run("salloc", "-N2", *words, "bash", "-c", code)
        assert got.returncode == 3, got.stderr
        assert re.search(r"^launch: rank 0 on \S+ ended with exit status 3\n", got.stderr, re.MULTILINE)
        assert "launch: rank 1 had ended with exit status 0\n" in got.stderr
        assert not re.search(r"launch \d", got.stderr)


POLITE = """
import os, signal, sys, time
asked = []
def note(number, frame):
    sys.stdout.write(f"rank {os.environ['RANK']} got {signal.Signals(number).name}\\n")
    asked.append(number)
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), note)
sys.stdout.write(f"rank {os.environ['RANK']} ready\\n")
end = time.time() + 100
while time.time() < end and not set(asked) & {signal.SIGINT, signal.SIGTERM}:
    time.sleep(0.02)
time.sleep(0.5)
sys.stdout.write(f"rank {os.environ['RANK']} finished\\n")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_to_launch_lets_ranks_finish(cluster: Cluster, tmp_path: Path, number: signal.Signals) -> None:
    """srun itself would answer SIGTERM with SIGKILL to the ranks."""
    (tmp_path / "polite.py").write_text(POLITE)
    script = f"echo $$ > pid; exec launch -N 2 -n 2 {sys.executable} polite.py > out 2>&1"
    job = cluster.start("salloc", "-N2", "-n2", "bash", "-c", script)
    out = tmp_path / "out"
    wait_for(job, out, "ready", 2)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGUSR1)
    wait_for(job, out, "got SIGUSR1", 2)
    os.kill(pid, number)
    job.communicate(timeout=90)
    text = out.read_text()
    assert text.count(f"got {number.name}") == 2, text
    assert text.count("finished") == 2, text
    assert record(tmp_path)["exit_status"] == 128 + number
    assert not list(tmp_path.glob(".wordrun-launch-*"))


def test_scancel_ends_all_in_seconds(cluster: Cluster, tmp_path: Path) -> None:
    script = batch(tmp_path, "launch sh -c 'echo ready; exec sleep 61.25'", nodes="2", ntasks="2")
    job = cluster.start("sbatch", "--wait", script)
    wait_for(job, tmp_path / "out-4294967294.txt", "ready", 2)
    cluster.run("scancel", "--user=root")
    job.communicate(timeout=50)
    assert subprocess.run(["pgrep", "-f", "sleep 61.25"], capture_output=True).returncode == 1


def test_a_node_that_goes_down_ends_the_launch(cluster: Cluster, tmp_path: Path) -> None:
    where = "sh -c 'echo $SLURMD_NODENAME >> where; exec sleep 61'"
    job = cluster.start(
        "salloc", "--no-kill", "-N2", "-n2", "bash", "-c", f"launch -N 2 -n 2 {where}; echo $? > status"
    )
    wait_for(job, tmp_path / "where", "n", 2)
    cluster.set_node((tmp_path / "where").read_text().split()[0], "down")
    job.communicate(timeout=50)
    assert (tmp_path / "status").read_text().strip() not in ("", "0")


@pytest.mark.forked_programs
def test_a_plain_torch_script(cluster: Cluster) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "plain_ddp.py"
    got = cluster.run("salloc", "-N2", "-n2", "launch", "-N", "2", "-n", "2", sys.executable, script, timeout=120)
    assert got.returncode == 0, got.stdout + got.stderr


TAKEN_ONCE = """
import os, socket, sys
from wordrun.dist import session
if os.environ["RANK"] == "0" and not os.path.exists("tried"):
    open("tried", "w").close()
    server = socket.create_server(("", int(os.environ["MASTER_PORT"])))
with session() as world:
    sys.stdout.write(f"{world.rank} of {world.size} has met the others\\n")
"""


@pytest.mark.forked_programs
def test_a_port_that_was_taken_in_the_meantime_is_survived(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(TAKEN_ONCE)
    # Over MPI, rank 0 would tell the others of another port.
    words = ("salloc", "-N2", "-n2", "launch", "--launcher-args", "--mpi=none", "-N", "2", "-n", "2")
    got = cluster.run(*words, sys.executable, "rank.py", timeout=120)
    assert got.returncode == 0, got.stdout + got.stderr
    assert got.stdout.count("has met the others") == 2
    assert "was taken in the meantime: relaunching with another port" in got.stderr


def test_launch_inside_a_step_is_refused(cluster: Cluster) -> None:
    got = cluster.run("srun", "-n1", "launch", "-n", "2", "true")
    assert got.returncode == 2
    assert "this is already task 0 of step 0 of SLURM job" in got.stderr


def test_more_ranks_than_the_job_has_room_for(cluster: Cluster, tmp_path: Path) -> None:
    got = cluster.run("salloc", "-N2", "-n4", "launch", "-n", "5", "true")
    assert got.returncode == 2
    assert "has room for 4 ranks on 2 nodes (3+1 by devices and cores); -n 4 would fit" in got.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.forked_programs
def test_submit_takes_a_chain_through_sbatch_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "outputs/launches").mkdir(parents=True)
    words = ("-N", "2", "-n", "4", "--walltime", "0:05:00", "--job-name", "chained", "--chain", "2", "--", "sh", "-c")
    got = cluster.run("launch", "--submit", *words, WHO, PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert got.returncode == 0, got.stderr
    first, second = re.findall(r"submitted (\d+) then (\d+)", got.stdout)[0]
    for number in (first, second):
        end = time.monotonic() + 60
        path = tmp_path / f"chained-{number}.out"
        # The second job has nothing to do, because the first one's command has ended with 0.
        while not path.exists() or (path.read_text().count("/4 ") < 4 and "nothing to do: " not in path.read_text()):
            assert time.monotonic() < end, path.read_text() if path.exists() else cluster.run("squeue").stdout
            time.sleep(0.2)
    cluster.wait_idle(60)
    assert len(list(tmp_path.glob("outputs/launches/*.json"))) == 1
    assert (tmp_path / f"chained-{second}.out").read_text().startswith("nothing to do: an earlier job of the chain ")
    text = (tmp_path / f"chained-{first}.out").read_text()
    assert text.count("/4 ") == 4
    assert "scheduler       slurm" in text  # what setup_job prints


def test_sbatch_that_refuses(cluster: Cluster) -> None:
    words = ("--walltime", "0:05:00", "--queue", "nowhere", "--scheduler", "slurm", "true")
    got = cluster.run("launch", "--submit", *words)
    assert got.returncode == 2
    assert "rejected the job" in got.stderr
    assert "invalid partition" in got.stderr


def test_ranks_are_told_before_the_walltime_ends(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "polite.py").write_text(POLITE)
    # SLURM counts whole minutes: 45 s before the end is 15 s after the start.
    words = ("salloc", "-N2", "-n2", "--time=1", "bash", "-c")
    job = cluster.start(*words, f"exec launch --walltime-margin 45 {sys.executable} polite.py > out 2>&1")
    wait_for(job, tmp_path / "out", "got SIGUSR1", 2)
    assert "launch: the walltime ends soon" in (tmp_path / "out").read_text()


# As on a busy host, rank 0 acts on SIGABRT later than the other one, whose end would end the step.
STUCK = """
import os, signal, time
def waits_for_ever():
    if os.environ["RANK"] == "0":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGABRT])
        while signal.SIGABRT not in signal.sigpending():
            time.sleep(0.05)
        time.sleep(0.5)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGABRT])
    time.sleep(60)
waits_for_ever()
"""


def test_idle_ranks_show_their_stacks(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    for folder, does in (("none", "exit 1"), ("one", "echo stacks of $(tr '\\0' ' ' < /proc/$3/cmdline)")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "py-spy").write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / folder / "py-spy").chmod(0o755)
    words = f"launch --idle-timeout 8 -N 2 -n 2 {sys.executable} stuck.py"
    both = f"PATH=$PWD/none:$PATH {words}; PATH=$PWD/one:$PATH exec {words}"
    got = cluster.run("salloc", "-N2", "-n2", "sh", "-c", both)
    assert got.returncode == 124, got.stderr
    # Both print at the same time, and srun mixes what they write piece by piece.
    assert got.stderr.count("waits_for_ever") == 2, got.stderr
    # The ranks are no children of srun; both of them are on this machine.
    assert got.stderr.count(f"stacks of {sys.executable} stuck.py") == 2, got.stderr


def test_the_rank_that_the_others_wait_for_is_named_with_its_node(cluster: Cluster, tmp_path: Path) -> None:
    text = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(1000)  # line 7
dist.all_reduce(torch.ones(5))
"""
    (tmp_path / "late.py").write_text(text)
    got = cluster.run("salloc", "-N2", "-n2", "launch", "--hang", "3", sys.executable, "late.py", timeout=120)
    assert got.returncode == 124, got.stderr
    assert "no progress for 3 s: rank 1 has not reached all_reduce number 1 of float32 [5] of 2 ranks; " in got.stderr
    places = r"rank 1 \((n\d)\) is at late.py:7 in <module>; rank 0 \((n\d)\) is at late.py:8 in "
    assert (found := re.search(places, got.stderr)), got.stderr
    assert found[1] != found[2]


def test_doctor(cluster: Cluster, tmp_path: Path) -> None:
    pairs = [
        {"hosts": hosts, "gb_per_s": speed}
        for *hosts, speed in (("n1", "n2", 2.0), ("n1", "n3", 0.02), ("n2", "n3", 0.03))
    ]
    measured = tmp_path / "outputs" / "bandwidth" / "before" / "bandwidth.json"
    measured.parent.mkdir(parents=True)
    measured.write_text(json.dumps({"device": "cpu (gloo)", "pairs": pairs}))
    got = cluster.run("salloc", "-N3", "-n3", "launch", "--doctor", "--json", timeout=120)
    assert got.returncode == 0, got.stdout + got.stderr
    found = {finding["check"]: finding for finding in json.loads(got.stdout)}
    assert found["ranks"]["found"] == "all 3 ranks answered (1 host)"  # it is this machine three times
    assert found["MPI"]["found"] == "sees 3 ranks, as many as srun started"
    assert found["bandwidth"]["state"] == "warning"
    assert found["bandwidth"]["found"].startswith("slow: n3 0.025 GB/s; median 1.01 GB/s (gloo)")


def test_doctor_finds_an_mpi_that_does_not_speak_to_srun(cluster: Cluster) -> None:
    # A PMI that nobody serves: each rank is alone in MPI.
    none = ("--launcher-args", "--mpi=none")
    words = ("salloc", "-N2", "-n2", "launch", *none, "--env", "PMI_RANK=0", "--doctor", "--json")
    got = cluster.run(*words, timeout=120)
    assert got.returncode == 1, got.stdout + got.stderr
    found = {finding["check"]: finding for finding in json.loads(got.stdout)}
    assert (found["MPI"]["state"], found["MPI"]["found"]) == ("wrong", "sees ['1'] where srun started 2")


# UCX's addresses take lines of about 1024 bytes, depending on what memory contains; SLURM's pmi2 reads no longer ones.
MPI_SUM = """
import os, sys
from mpi4py import MPI
world, network = MPI.COMM_WORLD, os.environ["MPIR_CVAR_CH4_NETMOD"]
sys.stdout.write(f"{world.rank} of {world.size} over {network}, sum {world.allreduce(world.rank)}\\n")
"""


def test_an_mpi_program_sees_all_ranks_though_mpidefault_is_none(cluster: Cluster) -> None:
    got = cluster.run("salloc", "-N2", "-n4", "launch", sys.executable, "-c", MPI_SUM)
    assert sorted(got.stdout.splitlines()) == [f"{rank} of 4 over ofi, sum 6" for rank in range(4)], got.stderr


@pytest.mark.parametrize(
    ("program", "args", "env", "why"),
    [
        ((sys.executable, "x.py"), [], {}, r"--mpi=pmi2: python\S* loads MPICH \S+"),
        (("wordrun",), [], {}, r"--mpi=pmi2: python\S* loads MPICH \S+"),
        (("mpichversion",), [], {}, r"--mpi=pmi2: mpichversion is linked with MPICH \S+"),
        (("true",), [], {"SLURM_MPI_TYPE": "none"}, "SLURM_MPI_TYPE=none was exported"),
        (("true",), ["--launcher-args", "--mpi=cray_shasta"], {}, "--mpi as given"),
    ],
    ids=["python", "a Python script", "a compiled program", "exported", "given"],
)
def test_the_mpi_type_follows_from_the_program_unless_the_user_chooses_it(
    cluster: Cluster, program: tuple[str, ...], args: list[str], env: dict[str, str], why: str
) -> None:
    got = cluster.run("salloc", "-N1", "-n2", "launch", "--dry-run", *args, *program, **env)
    assert re.search(rf"^# launcher: srun .*; {why}\)$", got.stdout, re.MULTILINE), got.stdout + got.stderr
    command = got.stdout.splitlines()[-1]
    assert ("--mpi=pmi2" in command) == why.startswith("--mpi=pmi2")
    assert ("--mpi=cray_shasta" in command) == bool(args)


@pytest.mark.parametrize(
    ("option", "message"),
    [("--retries=1", "SLURM lost a node"), ("--elastic", "has ended: restarting 2 ranks")],
    ids=["launched again", "guardian of the spare node"],
)
def test_without_a_node_that_failed_the_run_continues(
    cluster: Cluster, tmp_path: Path, option: str, message: str
) -> None:
    """On a spare node; with its guardian, nothing is relaunched."""
    rank = tmp_path / "rank.sh"
    rank.write_text("echo $SLURMD_NODENAME >> where$TRIES; [ -e again ] || { touch ready; exec sleep 61; }")
    words = ("launch", option, "--spare-nodes", "1", "sh", rank)
    script = f"{' '.join(map(str, words))} > out 2>&1; echo $? > status"
    job = cluster.start("salloc", "--no-kill", "-N3", "--ntasks-per-node=1", "bash", "-c", script)
    wait_for(job, tmp_path / "where", "n", 2)
    first = (tmp_path / "where").read_text().split()
    (tmp_path / "again").touch()
    cluster.set_node(first[1], "down")
    job.communicate(timeout=60)
    text = (tmp_path / "out").read_text()
    assert (tmp_path / "status").read_text().strip() == "0", text
    second = (tmp_path / "where").read_text().split()[2:]
    assert len(second) == 2, text
    assert first[1] not in second
    assert message in text
    assert ("relaunching" in text) == (option != "--elastic"), text
    assert option != "--elastic" or f"launch: the guardian on {first[1]} " in text, text


def test_guardians_restart_the_ranks_of_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """In the same step, and with SLURM's variables as ranks of srun have them."""
    rank = tmp_path / "rank.sh"
    rank.write_text(
        'echo "$WORDRUN_GENERATION $SLURM_STEP_ID $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK '
        '$SLURM_PROCID/$SLURM_NTASKS $SLURM_LOCALID $SLURM_NODEID $SLURMD_NODENAME"\n'
        "[ $WORDRUN_GENERATION = 1 ] && exit\n"
        "[ $RANK = 3 ] && kill -9 $$\n"
        "sleep 300\n"
    )
    got = cluster.run("salloc", "-N2", "--ntasks-per-node=2", "launch", "--elastic", "-N", "2", "-n", "4", "sh", rank)
    assert got.returncode == 0, got.stderr
    lines = sorted(line.split() for line in got.stdout.splitlines() if line.startswith("1"))
    assert [line[2:8] for line in lines] == [
        [f"{each}/4", f"{each % 2}/2", f"{each // 2}", f"{each}/4", f"{each % 2}", f"{each // 2}"] for each in range(4)
    ]
    assert len({line[1] for line in lines}) == 1
    assert len({line[8] for line in lines}) == 2
    assert "rank 3 was killed (SIGKILL, not for lack of memory on this host): restarting the ranks" in got.stderr
