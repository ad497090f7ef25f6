"""Job scripts for the sites, and what keeps one from being written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wordrun.errors import ConfigError
from wordrun.launch import site
from wordrun.launch.options import parse
from wordrun.launch.submit import Place, SubmitError, commands, margin, script, seconds, submit

PLACE = Place("/p/my runs", "/no/venv", "/repo/bin/setup.sh")
RUN_ID = "20260102-030405-abcd"
LAUNCH = str(Path(sys.prefix) / "bin" / "launch")


def written(where: str, *words: str) -> str:
    known = site.find(where, "", {"HOME": "/nobody"})[0]
    assert known
    return script(
        parse(["--submit", *words, "python", "-m", "wordrun", "train.max_iters=5"]),
        known,
        known.scheduler,
        PLACE,
        RUN_ID,
    )


def test_polaris() -> None:
    words = ("-N", "2", "--walltime", "1:00:00", "--queue", "debug", "--account", "X", "--env", "A=b c")
    assert (
        written("polaris", *words, "--walltime-margin", "200")
        == """\
#!/bin/bash --login
# ALCF Polaris, 560 nodes, 4 A100 each; written by launch --submit
#PBS -N wordrun
#PBS -A X
#PBS -q debug
#PBS -l select=2
#PBS -l walltime=1:00:00
#PBS -l filesystems=home:eagle
#PBS -l place=scatter
#PBS -j oe
#PBS -r n

cd '/p/my runs' || exit
module use /soft/modulefiles
module load conda
conda activate base
source /repo/bin/setup.sh && setup_python && setup_job || exit
export WORDRUN_RUN_ID=20260102-030405-abcd
export WORDRUN_RESUME=auto

# qdel and the time limit tell this shell too: then the ranks save, and the job is over
trap 'ending=yes' TERM
launch -N 2 --env 'A=b c' --walltime-margin 200 -- python -m wordrun train.max_iters=5
status=$?
if [ "$status" -eq 75 ] && [ -z "${ending-}" ]; then
  echo "saved: submit this script again to go on"
fi
exit "$status"
"""
    )


def test_perlmutter() -> None:
    words = ("-N", "2", "--walltime", "4:00:00", "--queue", "regular", "--account", "m1", "--job-name", "gpt")
    assert (
        written("perlmutter", *words, "--walltime-margin", "300", "--chain", "3")
        == """\
#!/bin/bash --login
# NERSC Perlmutter, GPU nodes of 4 A100; written by launch --submit
#SBATCH --job-name=gpt
#SBATCH --account=m1
#SBATCH --qos=regular
#SBATCH --nodes=2
#SBATCH --time=4:00:00
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --constraint=gpu
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gpt-%j.out

cd '/p/my runs' || exit
module load pytorch/2.8.0
source /repo/bin/setup.sh && setup_python && setup_job || exit
export WORDRUN_RUN_ID=20260102-030405-abcd
export WORDRUN_RESUME=auto

# scancel and the time limit tell this shell too: then the ranks save, and the job is over
trap 'ending=yes' TERM
launch -N 2 -- python -m wordrun train.max_iters=5
status=$?
if [ "$status" -eq 75 ] && [ -z "${ending-}" ]; then
  echo "saved: the next job of the chain goes on (after the last one, submit this script again)"
  status=0
fi
exit "$status"
"""
    )


def test_preemptable_jobs_may_run_again() -> None:
    assert "#PBS -r y" in written("polaris", "--walltime", "1:00:00", "--queue", "preemptable", "--account", "X")


# The options that a site's users would give, beside the account and the walltime.
ASKED = {
    "aurora": "-N 2 --queue debug", "baskerville": "-N 2 --queue arc", "crux": "-N 2 --queue debug",
    "engaging": "-N 1 --ppn 2 --queue mit_normal_gpu", "frontier": "-N 2 --queue batch",
    "juwels_booster": "-N 2 --queue develbooster", "perlmutter": "-N 2 --queue regular",
    "polaris": "-N 2 --queue debug", "sophia": "-n 4 --queue by-gpu", "sunspot": "-N 2",
}  # fmt: skip


@pytest.mark.parametrize("name", site.site_files({"HOME": "/nobody"}))
def test_every_site_has_its_script(name: str) -> None:
    words = (*ASKED[name].split(), "--walltime", "0:30:00", "--account", "X")
    text = written(name, *words)
    assert text == (Path(__file__).parent / "job_scripts" / f"{name}.sh").read_text()
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


MARGINS = {
    "a long walltime": ("--walltime 1:00:00 -- python -m wordrun", 120),
    "a short one": ("--walltime 0:05:00 -- /venv/bin/wordrun data=sample", 15),
    "as asked": ("--walltime 0:05:00 --walltime-margin 40 -- wordrun", 40),
    "none is asked for": ("--walltime 1:00:00 --walltime-margin 0 -- wordrun", 0),
    "a program that may know no SIGUSR1": ("--walltime 1:00:00 -- python train.py wordrun.yaml", None),
}  # fmt: skip


@pytest.mark.parametrize(("words", "seconds"), MARGINS.values(), ids=MARGINS)
def test_who_is_told_before_the_walltime_ends(words: str, seconds: float | None) -> None:
    options = parse(["--submit", *words.split()])
    assert margin(options) == seconds
    slurm = script(options, None, "slurm", PLACE, RUN_ID)
    assert re.findall(r"--signal=USR1@(\d+)\n", slurm) == ([str(seconds)] if seconds else [])
    assert "--walltime-margin" not in slurm
    pbs = script(options, None, "pbs", PLACE, RUN_ID)
    assert re.findall(r"^launch --walltime-margin (\d+) --", pbs, re.MULTILINE) == ([str(seconds)] if seconds else [])


def test_only_the_ranks_of_an_srun_are_told_by_slurm() -> None:
    """It would tell the daemons of another launcher, who die of it; launch keeps the time there."""
    words = "--walltime 1:00:00 --launcher hydra -n 2 -- wordrun"
    text = script(parse(["--submit", *words.split()]), None, "slurm", PLACE, RUN_ID)
    assert "--signal" not in text
    assert "\nlaunch -n 2 --launcher hydra --walltime-margin 120 -- wordrun\n" in text


ENDINGS = {
    "slurm, saved": ("slurm", 1, "exit 75", 75, "requeue 7"),
    "slurm, finished": ("slurm", 1, "exit 0", 0, ""),
    "slurm, failed": ("slurm", 1, "exit 1", 1, ""),
    "slurm, cancelled": ("slurm", 1, "kill $PPID; exit 75", 75, ""),
    "a link that has saved": ("slurm", 3, "exit 75", 0, ""),
    "a link that has failed": ("slurm", 3, "exit 3", 3, ""),
    "a link that was cancelled": ("slurm", 3, "kill $PPID; exit 75", 75, ""),
    "pbs, saved": ("pbs", 1, "exit 75", 75, ""),
    "pbs, a link that has saved": ("pbs", 3, "exit 75", 0, ""),
}  # fmt: skip


@pytest.mark.parametrize(("scheduler", "chain", "ranks", "status", "asked"), ENDINGS.values(), ids=ENDINGS)
def test_how_a_job_script_ends(tmp_path: Path, scheduler: str, chain: int, ranks: str, status: int, asked: str) -> None:
    program(tmp_path, "launch", f'echo "$WORDRUN_RUN_ID $WORDRUN_RESUME"; {ranks}')
    program(tmp_path, "scontrol", 'echo "$*" > asked')
    options = parse(["--submit", "--walltime", "1:00:00", "--chain", str(chain), "--", "wordrun"])
    text = script(options, None, scheduler, Place(str(tmp_path), str(tmp_path), ""), RUN_ID)
    text = text.replace(f"export PATH={tmp_path}/bin:", f"export PATH={tmp_path}:")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env={**os.environ, "SLURM_JOB_ID": "7"})
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(f"{RUN_ID} auto\n")
    assert ("saved:" in done.stdout) == (ranks == "exit 75")
    assert ((tmp_path / "asked").read_text().strip() if asked else "") == asked
    assert (tmp_path / "asked").exists() == bool(asked)


MISTAKES = {
    "no walltime, no account": (["-N", "1"], ["--walltime H:MM:SS", "--account PROJECT"]),
    "queue": (["--walltime", "1:00:00", "--account", "X", "--queue", "debugg"], ["did you mean 'debug'?"]),
    "nodes": (
        ["--walltime", "1:00:00", "--account", "X", "--queue", "debug", "-N", "3"], ["debug takes 1 to 2 nodes"]
    ),
    "hours": (["--walltime", "2:00:00", "--account", "X", "--queue", "debug"], ["ends jobs after 1 h"]),
}  # fmt: skip


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES)
def test_what_the_site_does_not_allow(words: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        written("polaris", *words)
    assert all(word in str(caught.value) for word in says), caught.value


def test_a_queue_that_is_needed() -> None:
    with pytest.raises(ConfigError, match="--submit on baskerville needs --queue NAME"):
        written("baskerville", "--walltime", "1:00:00", "--account", "X")


@pytest.mark.parametrize(("text", "value"), [("1:00:00", 3600), ("0:00:30", 30), ("2-01:00:00", 49 * 3600)])
def test_walltimes(text: str, value: int) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("words", [["--walltime", "60"], ["--walltime", "1h"], ["--queue", "debug"], ["--chain", "2"]])
def test_options_that_make_no_sense(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse([*words, "true"])


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_chain_of_pbs_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "qsub", 'echo "$*" >> calls; echo "$(wc -l < calls).server"')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    monkeypatch.setenv("PATH", env["PATH"])
    assert submit("pbs", "job.sh", 3, env) == ["1.server", "2.server", "3.server"]
    assert (tmp_path / "calls").read_text().splitlines() == [
        "job.sh", "-W depend=afterany:1.server job.sh", "-W depend=afterany:2.server job.sh"
    ]  # fmt: skip
    assert commands("slurm", "job.sh", "17") == ["sbatch", "--parsable", "--dependency=afterany:17", "job.sh"]


def test_a_scheduler_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "qsub", "echo 'qsub: no such project' >&2; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SubmitError, match=r"(?s)qsub job.sh refused the job \(exit status 9\):\nqsub: no such project"):
        submit("pbs", "job.sh", 1, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    words = [LAUNCH, "--submit", "--site", "polaris", "--walltime", "1:00:00", "--account", "X", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "launch: qsub: no such project" in done.stderr
    dry = subprocess.run([*words[:2], "--dry-run", *words[2:]], capture_output=True, text=True)
    assert dry.stdout.startswith("#!/bin/bash --login\n# ALCF Polaris")
    assert re.search(r"^export WORDRUN_RUN_ID=\d{8}-\d{6}-[0-9a-f]{4}$", dry.stdout, re.MULTILINE)
    env = {**os.environ, "WORDRUN_RUN_ID": RUN_ID}
    dry = subprocess.run([*words[:2], "--dry-run", *words[2:]], capture_output=True, text=True, env=env)
    assert f"\nexport WORDRUN_RUN_ID={RUN_ID}\n" in dry.stdout
