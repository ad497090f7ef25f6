"""Job scripts for the sites, and what keeps one from being written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wordrun.errors import ConfigError
from wordrun.launch import site
from wordrun.launch.options import parse
from wordrun.launch.submit import Place, SubmitError, commands, script, seconds, submit

PLACE = Place("/p/my runs", "/no/venv", "/repo/bin/setup.sh")
LAUNCH = str(Path(sys.prefix) / "bin" / "launch")


def written(where: str, *words: str) -> str:
    known = site.find(where, "", {"HOME": "/nobody"})[0]
    assert known
    return script(
        parse(["--submit", *words, "python", "-m", "wordrun", "train.max_iters=5"]), known, known.scheduler, PLACE
    )


def test_polaris() -> None:
    words = ("-N", "2", "--walltime", "1:00:00", "--queue", "debug", "--account", "X", "--env", "A=b c")
    assert (
        written("polaris", *words, "--walltime-margin", "120")
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

launch -N 2 --env 'A=b c' --walltime-margin 120.0 -- python -m wordrun train.max_iters=5
"""
    )


def test_perlmutter() -> None:
    words = ("-N", "2", "--walltime", "4:00:00", "--queue", "regular", "--account", "m1", "--job-name", "gpt")
    assert (
        written("perlmutter", *words, "--walltime-margin", "300")
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
export PATH=/no/venv/bin:$PATH
source /repo/bin/setup.sh && setup_python && setup_job || exit

launch -N 2 -- python -m wordrun train.max_iters=5
"""
    )


def test_preemptable_jobs_may_run_again() -> None:
    assert "#PBS -r y" in written("polaris", "--walltime", "1:00:00", "--queue", "preemptable", "--account", "X")


# The options that a site's users would give, beside the account, the walltime and the margin.
ASKED = {
    "aurora": "-N 2 --queue debug", "baskerville": "-N 2 --queue arc", "crux": "-N 2 --queue debug",
    "engaging": "-N 1 --ppn 2 --queue mit_normal_gpu", "frontier": "-N 2 --queue batch",
    "juwels_booster": "-N 2 --queue develbooster", "perlmutter": "-N 2 --queue regular",
    "polaris": "-N 2 --queue debug", "sophia": "-n 4 --queue by-gpu", "sunspot": "-N 2",
}  # fmt: skip


@pytest.mark.parametrize("name", site.site_files({"HOME": "/nobody"}))
def test_every_site_has_its_script(name: str) -> None:
    words = (*ASKED[name].split(), "--walltime", "0:30:00", "--account", "X", "--walltime-margin", "120")
    text = written(name, *words)
    assert text == (Path(__file__).parent / "job_scripts" / f"{name}.sh").read_text()
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


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
