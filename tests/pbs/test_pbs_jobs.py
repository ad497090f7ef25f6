"""What launch submits to PBS, and what it does in PBS's jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Cluster

UID = 31415
pytestmark = pytest.mark.timeout(180)

# pbs_tmrsh starts a process on another host of the job, though without the shell that ssh would start.
HYDRA = ("--launcher", "hydra", "--launcher-args", "-bootstrap rsh -bootstrap-exec ./rsh")

SMALL = tuple(
    shlex.split("""
    model=nano
    data=sample tracker=jsonl model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=16
    model.batch_size=2 train.max_iters=1 train.eval_interval=0 train.sample_tokens=0 train.device=cpu
    train.dtype=fp32
""")
)


def submit(cluster: Cluster, *words: str, user: bool = False) -> str:
    """Submit a command of launch from the present folder, and return the job's id; of a chain, all ids."""
    Path("rsh").write_text('#!/bin/sh\nhost=$1\nshift\nexec pbs_tmrsh "$host" sh -c "$*"\n')
    Path("rsh").chmod(0o755)
    limit = () if "--walltime" in words else ("--walltime", "0:05:00")
    done = cluster.run("launch", "--submit", *limit, "--job-name", "test", *words, user=user)
    assert done.returncode == 0, done.stderr
    (jobs,) = re.findall(r"^submitted (\S+(?: then \S+)*) \(site", done.stdout)
    return jobs.replace(" then ", " ")


@pytest.fixture
def odd(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's present folder, whose name has characters that mean something to shells, Hydra and PBS."""
    folder = cluster.home / """it's a "näme" $HOME #1 {x}=[y]"""
    folder.mkdir(exist_ok=True)
    os.chown(folder, UID, UID)
    monkeypatch.chdir(folder)
    return folder


@contextlib.contextmanager
def waiting(cluster: Cluster) -> Iterator[None]:
    """Let PBS start no job within the ``with`` block."""
    cluster.run("qmgr", "-c", "set server scheduling=False").check_returncode()
    try:
        yield
    finally:
        cluster.run("qmgr", "-c", "set server scheduling=True").check_returncode()


def test_a_submission_gets_its_nodes_its_site_and_its_code(cluster: Cluster, tmp_path: Path) -> None:
    """Left to itself, PBS would put both chunks on one host, and its TMPDIR would be the ranks'."""
    (tmp_path / "mine.yaml").write_text("scheduler: pbs\nlauncher: hydra\nenv: {TMPDIR: [/tmp, short]}\n")
    (tmp_path / "code.py").write_text("submitted")
    show = "echo rank $RANK on $(hostname) with $TMPDIR and $OMP_NUM_THREADS: $(cat code.py)"
    with waiting(cluster):
        job = submit(
            cluster, "--site", "mine.yaml", "-N", "2", "--ppn", "2", "--cores", "2", *HYDRA, "--", "sh", "-c", show
        )
        (tmp_path / "code.py").write_text("edited")
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends")
    assert cluster.job(job)["exec_host"] == "h1/0*2+h2/0*2"
    assert cluster.job(job)["Resource_List"]["place"] == "scatter"
    text = next(tmp_path.glob("test.o*")).read_text()
    assert "mine: " in text  # setup_job has read the file
    said = sorted(re.findall("^rank .*", text, re.MULTILINE))
    assert said == [f"rank {rank} on h{1 + rank // 2} with /tmp and 1: submitted" for rank in range(4)], text
    assert cluster.job(job)["Exit_status"] == 0, text


def test_ranks_are_warned_before_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """PBS sends no warning itself: launch asks qstat when the job ends."""
    rank = "trap 'touch saved-$RANK; exit 75' USR1; sleep 91.25 & wait"
    limit = ("--walltime", "0:01:30", "--walltime-margin", "70")
    job = submit(cluster, "--no-freeze", "-N", "2", "--ppn", "1", *limit, *HYDRA, "--", "sh", "-c", rank)
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends", 80)
    text = next(tmp_path.glob("test.o*")).read_text()
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"], text
    assert "saved: submit this script again to continue" in text
    assert cluster.job(job)["Exit_status"] == 75, text


def test_a_cancelled_job_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Nor on the other host. (PBS's daemons do not see processes of root, so this job gets no time to save.)"""
    job = submit(
        cluster, "--no-freeze", "-N", "2", "--ppn", "1", *HYDRA, "--", "sh", "-c", "touch ready-$RANK; sleep 61.25"
    )
    cluster.wait(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks are ready")
    assert cluster.run("qdel", job).returncode == 0
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends")
    for host in ("h1", "h2"):
        cluster.wait(lambda host=host: "61.25" not in cluster.run("ps", "ax", host=host).stdout, f"{host} is clean")


def test_a_sweep_is_a_job_per_point_or_one_for_several(cluster: Cluster, tmp_path: Path) -> None:
    jobs = {}
    for folder, per_job in (("each", 1), ("packed", 2)):
        words = [*SMALL, "train.seed=1,2", "hydra/launcher=wordrun", "hydra.launcher.submit=true"]
        options = ["walltime=0:05:00", f"points_per_job={per_job}", "job_nodes=1"]
        words += [f"hydra.launcher.{option}" for option in options]
        done = cluster.run("wordrun", "-m", *words, f"hydra.sweep.dir={folder}")
        assert done.returncode == 0, done.stdout + done.stderr
        jobs[folder] = re.findall(r"^points? [\d, ]+: job (\S+)", done.stdout, re.MULTILINE)
    assert {folder: len(names) for folder, names in jobs.items()} == {"each": 2, "packed": 1}
    for name in (*jobs["each"], *jobs["packed"]):
        cluster.wait(lambda name=name: cluster.job(name)["job_state"] == "F", "the job ends", 120)
        assert cluster.job(name)["Exit_status"] == 0, [path.read_text() for path in tmp_path.glob("sweep*.o*")]
    runs = [tmp_path / folder / str(number) / "run.json" for folder in jobs for number in range(2)]
    assert [json.loads(run.read_text())["exit_reason"] for run in runs] == ["finished"] * 4


@pytest.mark.timeout(300)
def test_a_run_of_a_cancelled_job_is_offered_to_the_next(cluster: Cluster, tmp_path: Path) -> None:
    """A new submission begins a run of its own, also with train.resume=auto, but its log names the unfinished one."""
    words = [
        *shlex.split("-N 1 --ppn 1"),
        *HYDRA,
        *shlex.split("""
        model=nano
        -- python -m wordrun data=sample tracker=jsonl
        model.n_layer=1 train.checkpoint_interval=5 train.max_iters=100000
    """),
    ]
    runs = tmp_path / "outputs/sample/nano-DDP"
    job = submit(cluster, *words)
    cluster.wait(lambda: [*runs.glob("*/checkpoints/step-*")], "a checkpoint", 100)
    assert cluster.run("qdel", job).returncode == 0
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends")
    (cancelled,) = runs.iterdir()
    submit(cluster, *words, "train.resume=auto")
    offer = f" train.resume={cancelled.relative_to(tmp_path)}\n"
    cluster.wait(lambda: any(offer in path.read_text() for path in runs.glob("*/log.txt")), "the offer", 100)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("again", ["--retries 2", "--elastic"])
def test_a_lost_host_is_replaced_by_the_spare_one(cluster: Cluster, tmp_path: Path, again: str) -> None:
    words = [
        *again.split(),
        *shlex.split("--no-freeze -N 2 --ppn 1 --spare-nodes 1"),
        *HYDRA,
        "--",
        "python",
        "-m",
        "wordrun",
    ]
    changed = ("train.max_iters=3000", "train.checkpoint_interval=100", "hydra.run.dir=run")
    job = submit(cluster, *words, *SMALL, *changed)
    cluster.wait(lambda: [*tmp_path.glob("run/checkpoints/step-*")], "a checkpoint", 100)
    cluster.kill_host("h2")
    try:
        cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends", 150)
    finally:
        cluster.start_daemons("h2")
    text = next(tmp_path.glob("test.o*")).read_text()
    assert "launch: finished without h2, lost during the run: resumed from " in text
    assert cluster.job(job)["Exit_status"] == 0, text


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.timeout(300)
def test_a_chain_whose_first_job_is_cancelled(cluster: Cluster, odd: Path) -> None:
    """Its losses are bitwise identical to those of an undisturbed run."""
    words = [*shlex.split("--no-freeze -N 2 --ppn 1"), *HYDRA, "--", "python", "-m", "wordrun", *SMALL]
    words += shlex.split("train.max_iters=3000 train.checkpoint_interval=100 train.log_interval=1")
    whole = submit(cluster, *words, "hydra.run.dir=whole", user=True)
    cluster.wait(lambda: cluster.job(whole)["job_state"] == "F", "the undisturbed run ends", 150)
    first, second = submit(cluster, "--chain", "2", *words, "hydra.run.dir=chained", user=True).split()
    cluster.wait(lambda: [*odd.glob("chained/checkpoints/step-*")], "a checkpoint", 100)
    assert cluster.run("qdel", first, user=True).returncode == 0
    cluster.wait(lambda: cluster.job(second)["job_state"] == "F", "the chain ends", 150)
    texts = [path.read_text() for path in sorted(odd.glob("test.o*"))]
    assert [cluster.job(job)["Exit_status"] for job in (whole, first, second)] == [0, 271, 0], texts
    assert 0 < max(losses(odd / "whole")) == max(losses(odd / "chained")), texts
    assert losses(odd / "whole") == losses(odd / "chained")


# Programs on two hosts, each with its exit status. (Rank 0 draws plots after the training and ends later than rank 1.)
STATUSES = """
$train hydra.run.dir=finished train.max_iters=1; echo finished $?
$train train.nothing=1; echo option $?
$launch python -c 'from wordrun import dist
with dist.session() as world: pass
raise SystemExit(37)'; echo script $?
$train hydra.run.dir=saved train.max_iters=1000000 & until grep -qs "step 1[0-9]" saved/log.txt; do sleep 0.2; done
kill -USR1 $!; wait $!; echo saved $?
"""


@pytest.mark.timeout(300)
def test_exit_statuses_on_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    hydra = f"{shlex.join(HYDRA[:-1])} '{HYDRA[-1]}'"
    (tmp_path / "job").write_text(
        f"""#!/bin/bash
cd {tmp_path}
export PATH={Path(sys.executable).parent}:$PATH
printf '#!/bin/sh\nhost=$1\nshift\nexec pbs_tmrsh "$host" sh -c "$*"\n' > rsh; chmod +x rsh
"""
        + STATUSES.replace("$launch", f"launch {hydra}").replace(
            "$train", f"launch {hydra} python -m wordrun {shlex.join(SMALL)}"
        )
    )
    done = cluster.run(
        "qsub", "-l", "select=2:ncpus=1:mpiprocs=1", "-l", "place=scatter", "-j", "oe", "-N", "test", "job"
    )
    job = done.stdout.strip()
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends", 240)
    text = next(tmp_path.glob("test.o*")).read_text()
    found = dict(re.findall(r"^(finished|option|script|saved) (\d+)$", text, re.MULTILINE))
    assert found == {"finished": "0", "option": "2", "script": "37", "saved": "75"}, text
    assert "MPI_Finalize" not in text
    assert cluster.job(job)["Exit_status"] == 0, text


# A rank that is killed, with and without --retries, and folders that are missing or full, each with an exit status.
OF_A_USER = """
$launch nosuchcommand; echo missing $?
$launch sh -c '[ $RANK = 0 ] && exec sleep 30; kill -9 $$'; echo killed $?
$launch --retries 1 sh -c '[ $RANK = 0 ] || ! mkdir tried || kill -9 $$'; echo retried $?
HOME=/nonexistent TMPDIR=/nonexistent $train train.max_iters=1 hydra.run.dir=homeless; echo homeless $?
HOME=~/full TMPDIR=~/full $train train.max_iters=1 hydra.run.dir=full; echo full $?
$launch --retries 1 python -m wordrun $small train.max_iters=1000 train.checkpoint_interval=100 hydra.run.dir=rank &
until ls rank/checkpoints/step-* >/dev/null 2>&1; do sleep 0.2; done
pbs_tmrsh h2 pkill -KILL -f hydra.run.dir=rank; wait $!; echo rank $?
(sleep 1; $launch sh -c 'exit 0'; echo second $?) & $launch sleep 5; echo first $?; wait
"""
SCRIPT = """#!/bin/bash
cd "$PBS_O_WORKDIR" || exit
export PATH={path}:$PATH
printf '#!/bin/sh\\nhost=$1\\nshift\\nexec pbs_tmrsh "$host" sh -c "$*"\\n' > rsh; chmod +x rsh
run() {{ command launch {hydra} "$@"; }}
"""


def script(text: str) -> str:
    """Return a job script whose $launch, $train and $small are launch, training and its options."""
    head = SCRIPT.format(path=Path(sys.executable).parent, hydra=shlex.join(HYDRA))
    train = f"run python -m wordrun {shlex.join(SMALL)}"
    return head + text.replace("$launch", "run").replace("$train", train).replace("$small", shlex.join(SMALL))


@pytest.mark.timeout(400)
def test_ranks_that_are_killed_and_folders_that_are_missing_or_full(cluster: Cluster, odd: Path) -> None:
    full = cluster.home / "full"
    full.mkdir(exist_ok=True)
    for host in ("h1", "h2"):
        cluster.run("mount", "-t", "tmpfs", "-o", "size=16k,mode=777", "tmpfs", full, host=host).check_returncode()
        cluster.run("sh", "-c", f"head -c 99999 /dev/zero > {full}/fill", host=host)
    (odd / "job").write_text(script(OF_A_USER))
    where = ("-l", "select=2:ncpus=1:mpiprocs=1", "-l", "place=scatter", "-j", "oe", "-N", "user")
    job = cluster.run("qsub", *where, "job", user=True).stdout.strip()
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends", 350)
    text = next(odd.glob("user.o*")).read_text()
    names = "missing killed retried homeless full rank second first"
    found = dict(re.findall(rf"^({names.replace(' ', '|')}) (\d+)$", text, re.MULTILINE))
    assert found == dict(zip(names.split(), ["127", "137", "0", "0", "0", "0", "0", "0"], strict=True)), text
    assert " is another launch of this job: both use the cores and devices" in text
    assert max(losses(odd / "rank")) == 1000


@pytest.mark.timeout(300)
def test_an_array_a_sweep_and_a_study_are_jobs(cluster: Cluster, odd: Path) -> None:
    (odd / "job").write_text(script("$train train.seed=$PBS_ARRAY_INDEX hydra.run.dir=array/$PBS_ARRAY_INDEX"))
    where = ("-J", "0-1", "-l", "select=1:ncpus=1:mpiprocs=1", "-j", "oe", "-N", "array")
    jobs = [cluster.run("qsub", *where, "job", user=True).stdout.strip()]
    one = ("-N", "1", "--ppn", "1", "--", "wordrun")
    sweep = ("train.seed=1,2", "hydra/launcher=wordrun", "hydra.launcher.nodes=1", "hydra.sweep.dir=swept/here")
    jobs.append(submit(cluster, *one, "-m", *SMALL, *sweep, user=True))
    study = ("study", "scaling", "--ranks", "1", "--steps", "5", "--out", "studied")
    small = [word for word in SMALL if "max_iters" not in word]
    jobs.append(submit(cluster, *one, *study, *small, user=True))
    for job in jobs:
        cluster.wait(lambda job=job: cluster.job(job)["job_state"] == "F", "the job ends", 150)
    texts = [path.read_text() for path in odd.glob("*.o*")]
    assert [cluster.job(job)["Exit_status"] for job in jobs] == [0, 0, 0], texts
    for folder in ("array/0", "array/1", "swept/here/0", "swept/here/1"):
        assert json.loads((odd / folder / "run.json").read_text())["exit_reason"] == "finished", texts
    assert ",done," in (odd / "studied" / "points.csv").read_text(), texts


@pytest.mark.timeout(300)
def test_host_names_that_resolve_to_loopback(cluster: Cluster, odd: Path) -> None:
    """As Debian's installer writes them into /etc/hosts."""
    text = "touch ready; until [ -e go ]; do sleep 0.2; done; $launch --doctor --json > doctor; echo doctor $?\n"
    (odd / "job").write_text(script(f"{text}$train hydra.run.dir=loopback; echo trained $?"))
    where = ("-l", "select=2:ncpus=1:mpiprocs=1", "-l", "place=scatter", "-j", "oe", "-N", "loopback")
    job = cluster.run("qsub", *where, "job", user=True).stdout.strip()
    cluster.wait((odd / "ready").exists, "the job runs")
    files = {cluster.folder / f"{host}.hosts": host for host in ("h1", "h2")}
    before = {path: path.read_text() for path in files}
    try:
        for path, host in files.items():
            path.write_text(re.sub(rf"\S+ {host}\n", f"127.0.1.1 {host}\n", before[path]))
        (odd / "go").touch()
        cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends", 200)
    finally:
        for path in files:
            path.write_text(before[path])
    text = next(odd.glob("loopback.o*")).read_text()
    assert "doctor 0\n" in text
    assert "trained 0\n" in text
    (found,) = (each for each in json.loads((odd / "doctor").read_text()) if each["check"] == "all-reduce")
    assert found["state"] == "warning"
    assert found["found"].startswith("h1 resolves to 127.0.1.1 on itself; h2 resolves to 127.0.1.1 on itself; gloo")
    assert found["remedy"].startswith("mend the line of /etc/hosts that begins with 127.0.1.1 on h1")


@pytest.mark.parametrize("counts", [(2, 1), (1, 3)], ids=["2+1", "1+3"])
def test_hosts_with_different_numbers_of_ranks(cluster: Cluster, tmp_path: Path, counts: tuple[int, int]) -> None:
    """Each rank knows its host's place, and training and test_dist work; rank 0 has all input; one thread per CPU."""
    hydra = f"{shlex.join(HYDRA[:-1])} '{HYDRA[-1]}'"
    show = 'echo "rank $RANK: $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $NODE_RANK, $OMP_NUM_THREADS, $(wc -c)" `hostname`'
    fail = "from mpi4py import MPI; c = MPI.COMM_WORLD; assert c.rank != 1, 'mine'; c.barrier()"
    (tmp_path / "job").write_text(
        f"""#!/bin/bash
cd {tmp_path}
export PATH={Path(sys.executable).parent}:$PATH
printf '#!/bin/sh\nhost=$1\nshift\nexec pbs_tmrsh "$host" sh -c "$*"\n' > rsh; chmod +x rsh
echo granted $NCPUS
head -c 3000000 /dev/zero | launch {hydra} sh -c {shlex.quote(show)}
launch {hydra} python -m wordrun.test_dist && echo passed
launch {hydra} python -m wordrun {shlex.join(SMALL)} hydra.run.dir=run
launch {hydra} python -c {shlex.quote(fail)}; echo status $?
"""
    )
    chunks = "+".join(f"1:ncpus={count}:mpiprocs={count}" for count in counts)
    done = cluster.run("qsub", "-l", f"select={chunks}", "-l", "place=scatter", "-j", "oe", "-N", "test", "job")
    job = done.stdout.strip()
    cluster.wait(lambda: cluster.job(job)["job_state"] == "F", "the job ends", 150)
    text = next(tmp_path.glob("test.o*")).read_text()
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    assert sorted(re.findall("^rank .*", text, re.MULTILINE)) == [
        f"rank {rank}: {local} of {counts[node]}, node {node}, 1, {0 if rank else 3000000} h{node + 1}"
        for rank, (node, local) in enumerate(places)
    ], text
    assert f"granted {counts[0]}\n" in text
    assert "\npassed\n" in text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit_reason"] == "finished", text
    assert "AssertionError: mine" in text
    assert "\nstatus 1\n" in text
