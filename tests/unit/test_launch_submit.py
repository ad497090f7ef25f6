"""Job scripts for the sites, and what keeps one from being written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from wordrun.common.errors import ConfigError
from wordrun.launch import limits, site_files
from wordrun.launch.job_script import Origin, script
from wordrun.launch.parser import OPTIONS, SUBMISSION, Option, parse
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import UNKNOWN
from wordrun.launch.submit import SubmitError, commands, make_outputs, submit, write
from wordrun.launch.walltime import default_margin, seconds

ORIGIN = Origin("/p/my runs", "/no/venv", "/repo/bin/setup.sh", "/p/my runs/gpt.finished")
RUN_ID = "20260102-030405-abcd"
LAUNCH = str(Path(sys.prefix) / "bin" / "launch")


def written(where: str, *words: str) -> str:
    known = site_files.find(where, "", {"HOME": "/nobody"})[0]
    assert known.name
    return script(
        parse(["--submit", *words, "python", "-m", "wordrun", "train.max_iters=5"]),
        known,
        SCHEDULERS[known.scheduler],
        ORIGIN,
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
source /repo/bin/setup.sh && setup_python && setup_job -N 2 --env 'A=b c' --walltime-margin 200 || exit
export WORDRUN_RUN_ID=20260102-030405-abcd
export WORDRUN_RESUME=auto

# qdel and the time limit signal this shell too: then the ranks save, and the job is over
trap 'ending=yes' TERM
launch -N 2 --env 'A=b c' --walltime-margin 200 -- python -m wordrun train.max_iters=5
status=$?
if [ "$status" -eq 75 ] && [ -z "${ending-}" ]; then
  echo "saved: submit this script again to continue"
fi
exit "$status"
"""
    )


@pytest.mark.parametrize(
    ("site", "queue", "request_line"),
    [("polaris", "debug-scaling", "#PBS -l select=3\n"), ("perlmutter", "debug", "#SBATCH --no-kill\n")],
)
def test_spare_nodes_are_requested_beside_those_of_the_ranks(site: str, queue: str, request_line: str) -> None:
    words = shlex.split(f"-N 2 --spare-nodes 1 --walltime 0:10:00 --queue {queue} --account X")
    text = written(site, *words)
    assert request_line in text
    assert site == "polaris" or "#SBATCH --nodes=3\n" in text
    assert "\nlaunch -N 2 --spare-nodes 1 " in text


def test_new_folders_of_results_are_made_beside_the_copy_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy links to them; else the job would make them in the copy, which users remove after the job."""
    monkeypatch.chdir(tmp_path)
    words = f"wordrun hydra.run.dir=a/b hydra.sweep.dir={tmp_path}/c hydra.run.dir=../d --out e --out=f data.name=g"
    make_outputs([*words.split(), "hydra.run.dir=${h}", "hydra.run.dir="])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "e", "f"]


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

finished='/p/my runs/gpt.finished'
if [ -e "$finished" ]; then
  echo "nothing to do: an earlier job of the chain ended with 0 (to run it again, remove $finished)"
  exit 0
fi
cd '/p/my runs' || exit
module load pytorch/2.8.0
source /repo/bin/setup.sh && setup_python && setup_job -N 2 || exit
export WORDRUN_RUN_ID=20260102-030405-abcd
export WORDRUN_RESUME=auto

# scancel and the time limit signal this shell too: then the ranks save, and the job is over
trap 'ending=yes' TERM
launch -N 2 -- python -m wordrun train.max_iters=5
status=$?
if [ "$status" -eq 75 ] && [ -z "${ending-}" ]; then
  echo "saved: the next job of the chain resumes the run (after the last one, submit this script again)"
  status=0
  saved=yes
fi
[ -n "${saved-}" ] || [ "$status" -ne 0 ] || : >"$finished"
exit "$status"
"""
    )


def test_preemptable_jobs_may_run_again() -> None:
    assert "#PBS -r y" in written("polaris", "--walltime", "1:00:00", "--queue", "preemptable", "--account", "X")


# The options that a site's users would give, beside the account and the walltime.
ASKED = {
    "aurora": "-N 2 --queue debug",
    "baskerville": "-N 2 --queue arc",
    "crux": "-N 2 --queue debug",
    "engaging": "-N 1 --ppn 2 --queue mit_normal_gpu",
    "frontier": "-N 2 --queue batch",
    "juwels_booster": "-N 2 --queue develbooster",
    "perlmutter": "-N 2 --queue regular",
    "polaris": "-N 2 --queue debug",
    "sophia": "-n 4 --queue by-gpu",
    "sunspot": "-N 2",
}


@pytest.mark.parametrize("name", site_files.site_files({"HOME": "/nobody"}))
def test_every_site_has_its_script(name: str) -> None:
    words = (*ASKED[name].split(), "--walltime", "0:30:00", "--account", "X")
    text = written(name, *words)
    assert text == (Path(__file__).parent / "job_scripts" / f"{name}.sh").read_text()
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def directives(text: str) -> list[str]:
    return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(("#PBS", "#SBATCH"))]


SELECTS = {
    "-n 8 --ppn 4": "2:mpiprocs=4",
    "-N 2": "2",
    "-N 2 --gpus 4": "2:ngpus=4:mpiprocs=4",
    "-n 8 --gpus 4": "2:ngpus=4:mpiprocs=4",
    "-N 2 --ppn 1 --gpus 4 --cores 32": "2:ncpus=32:ngpus=4:mpiprocs=1",
    "-n 6 --cores 16": "1:ncpus=16:mpiprocs=6",
}


@pytest.mark.parametrize(("words", "select"), SELECTS.items())
def test_pbs_is_asked_for_what_is_known_of_a_node(words: str, select: str) -> None:
    options = parse(["--submit", "--walltime", "2-01:30:00", *words.split(), "--", "true"])
    asked = directives(script(options, UNKNOWN, SCHEDULERS["pbs"], ORIGIN, RUN_ID))
    chunks = [f"-l select={select}", "-l walltime=49:30:00", "-l place=scatter"]
    assert asked == ["-N wordrun", *chunks, "-j oe", "-r n"]


PLACES = {
    "": ["-l place=scatter"],
    "submit: {directives: ['-l place=scatter:excl', -k doe]}": ["-l place=scatter:excl"],
    "submit: {directives: [-k doe]}": ["-l place=scatter"],
    "queues: {by-gpu: {device_per_rank: true}}": [],
}


@pytest.mark.parametrize(("text", "places"), PLACES.items())
def test_pbs_chunks_lie_on_as_many_nodes(tmp_path: Path, text: str, places: list[str]) -> None:
    """Without place=scatter PBS may put them all on one host; what a site's file says stays."""
    (tmp_path / "mine.yaml").write_text(f"scheduler: pbs\n{text}\n")
    words = ("-N", "2", "--ppn", "2", "--cores", "2", "--walltime", "1:00:00", "--queue", "by-gpu")
    asked = directives(written(str(tmp_path / "mine.yaml"), *words))
    assert [line for line in asked if "place" in line] == places


def test_a_site_file_says_what_a_node_has(tmp_path: Path) -> None:
    for text, select in (
        ("", "2:mpiprocs=4"),
        ("devices: 4\ncores: 64", "2:ncpus=64:ngpus=4:mpiprocs=4"),
        ("devices: 4\ncores: 64\nsubmit: {select: 'ngpus=4:gpu_type=a100'}", "2:ngpus=4:gpu_type=a100"),
    ):
        (tmp_path / "mine.yaml").write_text(f"scheduler: pbs\n{text}\n")
        asked = directives(written(str(tmp_path / "mine.yaml"), "-n", "8", "--ppn", "4", "--walltime", "1:00:00"))
        assert f"-l select={select}" in asked


SHARES = {
    "-N 2 --gpus 4": ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"],
    "-N 2 --gpus 4 --cores 64": ["--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=16", "--gpus-per-node=4"],
    "-N 2 --ppn 1 --gpus 4": ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4"],
    "-n 8 --gpus 4": ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"],
    "-N 2 -n 4": ["--nodes=2", "--ntasks-per-node=2"],
    "-N 2 -n 5": ["--nodes=2", "--ntasks=5", "--ntasks-per-node=3"],
    "-N 2": ["--nodes=2"],
    "-n 4 --cores 8": ["--nodes=1", "--ntasks-per-node=4", "--cpus-per-task=2"],
    "--cores 8": ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=8"],
}


@pytest.mark.parametrize(("words", "shares"), SHARES.items())
def test_slurm_is_asked_for_what_is_known_of_a_node(words: str, shares: list[str]) -> None:
    options = parse(["--submit", "--walltime", "1:00:00", *words.split(), "--", "true"])
    asked = directives(script(options, UNKNOWN, SCHEDULERS["slurm"], ORIGIN, RUN_ID))
    assert [line for line in asked if re.match("--(nodes|ntasks|cpus|gpus)", line)] == shares


PARTS = {
    "perlmutter": ("-N 1 --queue regular --gpus 2", ["--gpus-per-node=2", "--cpus-per-task=32"]),
    "baskerville": ("-N 1 --queue arc --gpus 1", ["--gpus-per-node=1", "--cpus-per-gpu=36"]),
    "engaging": ("-N 1 --queue mit_normal_gpu --gpus 3 --cores 12", ["--gres=gpu:3", "--cpus-per-task=4"]),
    "sophia": ("--queue by-gpu --gpus 4", ["-l select=4"]),
    "polaris": ("-n 8 --queue debug --gpus 4", ["-l select=2"]),
    "crux": ("-n 16 --queue debug", ["-l select=2:system=crux"]),
}


@pytest.mark.parametrize(("name", "words", "asked"), [(name, *part) for name, part in PARTS.items()], ids=PARTS)
def test_parts_of_a_sites_node(name: str, words: str, asked: list[str]) -> None:
    assert set(asked) <= set(directives(written(name, *words.split(), "--walltime", "0:30:00", "--account", "X")))


def test_a_python_outside_an_environment(tmp_path: Path) -> None:
    """A module's is the job's too; the system's would hide what the modules bring."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "python", "true")
    setup = "source /s.sh && setup_python{} && setup_job || exit"
    (tmp_path / "mine.yaml").write_text("scheduler: slurm\nmodules: [module load Python]\n")
    for where, prefix, lines in (
        (None, str(tmp_path), [f"export PATH={tmp_path}/bin:$PATH", setup.format(f" {tmp_path}")]),
        (
            str(tmp_path / "mine.yaml"),
            str(tmp_path),
            ["module load Python", f"export PATH={tmp_path}/bin:$PATH", setup.format(f" {tmp_path}")],
        ),
        (str(tmp_path / "mine.yaml"), "/usr", ["module load Python", setup.format("")]),
    ):
        known = site_files.find(where, "", {"HOME": "/nobody"})[0]
        options = parse(["--submit", "--walltime", "1:00:00", "true"])
        text = script(options, known, SCHEDULERS["slurm"], Origin("/p", prefix, "/s.sh"), RUN_ID)
        assert f"\ncd /p || exit\n{chr(10).join(lines)}\nexport WORDRUN_RUN_ID" in text


@pytest.fixture
def conda(tmp_path: Path) -> Path:
    """A conda environment whose python claims to have everything needed."""
    prefix = tmp_path / "my envs" / "torch"
    (prefix / "conda-meta").mkdir(parents=True)
    (prefix / "bin").mkdir()
    program(prefix / "bin", "python", '[ "$1" = - ] || echo Python 3.12.0')
    program(prefix / "bin", "launch", 'echo "$1: $(command -v python) $CONDA_PREFIX $MODULES"')
    return prefix


@pytest.mark.parametrize("site_text", ["", "modules: [export MODULES=loaded]"], ids=["no modules", "modules"])
@pytest.mark.parametrize("has_conda", [True, False])
def test_a_conda_environment_is_the_jobs_too(tmp_path: Path, conda: Path, site_text: str, has_conda: bool) -> None:
    """On a known site and off it, with another environment active where the job was submitted."""
    sites = tmp_path / "config" / "wordrun" / "sites"
    sites.mkdir(parents=True)
    (sites / "mine.yaml").write_text(f"scheduler: slurm\nrecognise:\n  env: {{WHERE: here}}\n{site_text}\n")
    (tmp_path / "bin").mkdir()
    if has_conda:
        program(tmp_path / "bin", "conda", f'echo "conda $*"; [ "$2" = "{conda}" ]')
    env = {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "WHERE": "here",
        "VIRTUAL_ENV": "/other",
        "CONDA_PREFIX": "",
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
    }
    known, _ = site_files.find(None, "", env)
    assert known.name
    place = Origin(str(tmp_path), str(conda), str(Path(__file__).parents[2] / "bin" / "setup.sh"))
    text = script(parse(["--submit", "--walltime", "1:00:00", "true"]), known, SCHEDULERS["slurm"], place, RUN_ID)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (f"conda activate {conda}" in lines) == has_conda
    assert f"python     {conda}/bin/python (Python 3.12.0; given as argument)" in lines
    found = f"{conda}/bin/python {'' if has_conda else conda} {'loaded' * bool(site_text)}"
    assert lines[-1] == f"--: {found}"


# Options that --submit itself acts on or that exclude it; every other one must reach the job.
NOT_FOR_JOBS = {"submit", "no_freeze", "stacks", "dry_run", "json", "info", "help", "version"}
VALUES = {
    "--env": "A=b",
    "--launcher-args": "-x y",
    "--scheduler": "pbs",
    "--launcher": "hydra",
    "--walltime": "3:00:00",
}


@pytest.mark.parametrize("option", dict.fromkeys(OPTIONS.values()), ids=lambda option: option.field)
def test_every_option_reaches_the_job(option: Option) -> None:
    value = VALUES.get(option.names[-1], "2")

    def job(*words: str) -> tuple[str, list[str]]:
        options = parse(["--submit", "--walltime", "1:00:00", *words, "--", "hostname"])
        text = script(options, UNKNOWN, SCHEDULERS["pbs"], ORIGIN, RUN_ID)
        return text, [line for line in text.splitlines() if line.startswith(("launch ", "source "))]

    text, lines = job(option.names[-1], *([value] if option.metavar else []))
    plain = job()[0]
    if option.field in NOT_FOR_JOBS:
        assert text == plain
    elif option in SUBMISSION or option.field == "doctor":
        assert text != plain  # a directive, or what happens at the end
    else:
        given = f" {shlex.join([option.names[0], *([value] if option.metavar else [])])} "
        assert [line.count(given) for line in lines] == [1, 1], text  # setup_job and launch


@pytest.mark.parametrize("how", ["--site FILE", "--site NAME", "recognised"])
def test_the_users_own_site_is_the_jobs_too(tmp_path: Path, how: str) -> None:
    """The job may run in another folder, without XDG_CONFIG_HOME, on hosts that the file does not recognise."""
    sites = tmp_path / "config" / "wordrun" / "sites"
    sites.mkdir(parents=True)
    recognise = "recognise: {env: {WHERE: here}}" if how == "recognised" else ""
    (sites / "mine.yaml").write_text(f"scheduler: pbs\n{recognise}\n")
    words = {"--site FILE": ["--site", "sites/mine.yaml"], "--site NAME": ["--site", "mine"], "recognised": []}[how]
    words = [LAUNCH, "--submit", "--dry-run", *words, "--walltime", "1:00:00", "hostname"]
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config"), "WHERE": "here"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=sites.parent)
    assert f"\nlaunch --site {sites}/mine.yaml -- hostname\n" in done.stdout, done.stderr
    assert f" && setup_job --site {sites}/mine.yaml || exit\n" in done.stdout


MARGINS = {
    "a long walltime": ("--walltime 1:00:00 -- python -m wordrun", 120),
    "a short one": ("--walltime 0:05:00 -- /venv/bin/wordrun data=sample", 15),
    "as asked": ("--walltime 0:05:00 --walltime-margin 40 -- wordrun", 40),
    "none is asked for": ("--walltime 1:00:00 --walltime-margin 0 -- wordrun", 0),
    "the command train": ("--walltime 1:00:00 -- wordrun train data=sample", 120),
    "a command that does not train": ("--walltime 1:00:00 -- python -m wordrun prepare data=sample", None),
    "a program that may know no SIGUSR1": ("--walltime 1:00:00 -- python train.py wordrun.yaml", None),
    "one with an option of that name": ("--walltime 1:00:00 -- python train.py --project wordrun lr=1", None),
}


@pytest.mark.parametrize(("words", "seconds"), MARGINS.values(), ids=MARGINS)
def test_default_margins_before_the_time_limit(words: str, seconds: float | None) -> None:
    options = parse(["--submit", *words.split()])
    assert default_margin(options) == seconds
    slurm = script(options, UNKNOWN, SCHEDULERS["slurm"], ORIGIN, RUN_ID)
    assert re.findall(r"--signal=USR1@(\d+)\n", slurm) == ([str(seconds)] if seconds else [])
    assert "--walltime-margin" not in slurm
    pbs = script(options, UNKNOWN, SCHEDULERS["pbs"], ORIGIN, RUN_ID)
    assert re.findall(r"^launch --walltime-margin (\d+) --", pbs, re.MULTILINE) == ([str(seconds)] if seconds else [])


def test_slurm_signals_only_the_ranks_of_srun() -> None:
    """It would signal the daemons of another launcher, which would be killed; launch keeps the time there."""
    words = "--walltime 1:00:00 --launcher hydra -n 2 -- wordrun"
    text = script(parse(["--submit", *words.split()]), UNKNOWN, SCHEDULERS["slurm"], ORIGIN, RUN_ID)
    assert "--signal" not in text
    assert "\nlaunch -n 2 --launcher hydra --walltime-margin 120 -- wordrun\n" in text


ENDINGS = {
    "slurm, saved": ("slurm", 1, "exit 75", 75, "requeue 7"),
    "slurm, finished": ("slurm", 1, "exit 0", 0, ""),
    "slurm, failed": ("slurm", 1, "exit 1", 1, ""),
    "slurm, cancelled": ("slurm", 1, "kill $PPID; exit 75", 75, ""),
    "a link that has saved": ("slurm", 3, "exit 75", 0, ""),
    "a link that has finished": ("slurm", 3, "exit 0", 0, ""),
    "pbs, a link that has finished": ("pbs", 3, "exit 0", 0, ""),
    "a link that has failed": ("slurm", 3, "exit 3", 3, ""),
    "a link that was cancelled": ("slurm", 3, "kill $PPID; exit 75", 75, ""),
    "pbs, saved": ("pbs", 1, "exit 75", 75, ""),
    "pbs, a link that has saved": ("pbs", 3, "exit 75", 0, ""),
}


@pytest.mark.parametrize(("scheduler", "chain", "ranks", "status", "asked"), ENDINGS.values(), ids=ENDINGS)
def test_how_a_job_script_ends(tmp_path: Path, scheduler: str, chain: int, ranks: str, status: int, asked: str) -> None:
    program(tmp_path, "launch", f'echo "$WORDRUN_RUN_ID $WORDRUN_RESUME"; {ranks}')
    program(tmp_path, "scontrol", 'echo "$*" > asked')
    options = parse(["--submit", "--walltime", "1:00:00", "--chain", str(chain), "--", "wordrun"])
    origin = Origin(str(tmp_path), str(tmp_path), "", str(tmp_path / "my job.finished"))
    text = script(options, UNKNOWN, SCHEDULERS[scheduler], origin, RUN_ID)
    text = text.replace(f"export PATH={tmp_path}/bin:", f"export PATH={tmp_path}:")
    run = partial(subprocess.run, capture_output=True, text=True, env={**os.environ, "SLURM_JOB_ID": "7"})
    done = run(["bash", "-c", text])
    assert done.returncode == status, done.stderr
    if chain > 1 and ranks == "exit 0":  # then the next job of the chain does nothing
        again = run(["bash", "-c", text])
        assert again.returncode == 0
        file = tmp_path / "my job.finished"
        assert (
            again.stdout
            == f"nothing to do: an earlier job of the chain ended with 0 (to run it again, remove {file})\n"
        )
    else:
        assert not (tmp_path / "my job.finished").exists()
    assert done.stdout.startswith(f"{RUN_ID} auto\n")
    assert ("saved:" in done.stdout) == (ranks == "exit 75")
    assert ((tmp_path / "asked").read_text().strip() if asked else "") == asked
    assert (tmp_path / "asked").exists() == bool(asked)


MISTAKES = {
    "no walltime, no account": (["-N", "1"], ["--walltime H:MM:SS", "--account PROJECT"]),
    "queue": (["--walltime", "1:00:00", "--account", "X", "--queue", "debugg"], ["did you mean 'debug'?"]),
    "nodes": (["--walltime", "1:00:00", "--account", "X", "--queue", "debug", "-N", "3"], ["debug takes 1 to 2 nodes"]),
    "gpus and cores": (
        ["--walltime", "1:00:00", "--account", "X", "--gpus", "2", "--cores", "99"],
        [
            "--gpus 2: the file of polaris says what jobs have of a node (submit.select)",
            "--cores 99: a node of polaris has 64 cores",
        ],
    ),
    "ranks": (
        ["--walltime", "1:00:00", "--account", "X", "-n", "5", "--ppn", "4"],
        ["-n 5 on 2 nodes contradicts --ppn 4"],
    ),
    "hours": (["--walltime", "2:00:00", "--account", "X", "--queue", "debug"], ["ends jobs after 1 h"]),
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES)
def test_what_the_site_does_not_allow(words: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        written("polaris", *words)
    assert all(word in str(caught.value) for word in says), caught.value


SMALL = "capacity (1 to 16 nodes, up to 168 h, 5 jobs of a user)"
SCALING = "debug-scaling (2 to 256 nodes, up to 1 h, 1 job of a user)"
# Aurora's queues: what is asked of them, the beginning of the refusal, and the queues that it names.
INVALID_OVERRIDE = [
    ("-N 16", "-N 16: aurora's default queue prod takes 256 to 10624 nodes", f"{SCALING}, {SMALL}"),
    ("-N 16 --queue debug", "-N 16: aurora's queue debug takes 1 to 2 nodes", f"{SCALING}, {SMALL}"),
    (
        "-N 2 --queue debug --spare-nodes 1",
        "-N 2 and --spare-nodes 1: aurora's queue debug takes 1 to 2 nodes",
        f"{SCALING}, {SMALL}",
    ),
    ("-n 12", "1 node (for -n 12): aurora's default queue prod takes 256 to 10624 nodes", "debug (1 to 2 nodes,"),
    ("-N 1 --queue debug --chain 2", "--chain 2: aurora's queue debug accepts 1 job per user at a time", SMALL),
    ("-N 2 --queue capacity --chain 6", "--chain 6: aurora's queue capacity accepts 5 jobs per user at a time", ""),
]


@pytest.mark.parametrize(("words", "says", "others"), INVALID_OVERRIDE)
def test_refusals_name_queues_that_take_the_job(words: str, says: str, others: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written("aurora", "--walltime", "1:00:00", "--account", "X", *words.split())
    assert str(caught.value).startswith(says)
    assert (f"; a queue that accepts it: {others}" if others else "; submit the next when") in str(caught.value)


@pytest.mark.parametrize("words", ["-N 64 --walltime 24:00:00 --queue debug", "-N 64 --walltime 24:00:00"])
def test_perlmutters_debug_queue_is_for_short_jobs_of_few_nodes(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written("perlmutter", "--account", "X", *words.split())
    nodes, hours = str(caught.value).splitlines()
    assert re.fullmatch("-N 64: perlmutter's (default )?queue debug takes 1 to 8 nodes", nodes)
    assert re.search(r"ends jobs after 0.5 h; a queue that accepts it: regular \(up to 48 h\), preempt", hours)


def test_a_queue_that_the_file_does_not_list_is_a_warning() -> None:
    words = ["--walltime", "1:00:00", "--account", "X", "--queue"]
    assert "#SBATCH --qos=interactive" in written("perlmutter", *words, "interactive")
    assert "#SBATCH --qos=regular_0" in written("perlmutter", *words, "regular_0")
    assert "#PBS -q R123456" in written("polaris", *words, "R123456"), "a reservation"

    def doubt(site: str, queue: str) -> str:
        known = site_files.find(site, "", {"HOME": "/nobody"})[0]
        return limits.doubt(parse(["--submit", *words, queue, "true"]), known)

    assert doubt("perlmutter", "regular_0").startswith(
        "--queue regular_0: its limits are unknown, so only the scheduler"
    )
    assert doubt("perlmutter", "regular_0").endswith("did you mean 'regular'?)")
    assert "R123456" in doubt("polaris", "R123456")
    assert (
        doubt("perlmutter", "debug") == doubt("juwels_booster", "booster,develbooster") == doubt("sunspot", "x") == ""
    )


def test_points_are_counted_before_the_first_is_submitted() -> None:
    known = site_files.find("aurora", "", {"HOME": "/nobody"})[0]
    options = parse(["--submit", "--walltime", "1:00:00", "--queue", "capacity", "--chain", "2", "true"])
    limits.check_points(options, known, 2, "")
    with pytest.raises(ConfigError, match=r"3 jobs with --chain 2: aurora's queue capacity accepts 5 jobs .*; fewer"):
        limits.check_points(options, known, 3, "fewer")


def test_the_doctor_as_a_job() -> None:
    options = parse(["--submit", "--doctor", "-N", "2", "--walltime", "0:10:00", "--queue", "debug", "--account", "X"])
    known = site_files.find("polaris", "", {"HOME": "/nobody"})[0]
    lines = script(options, known, SCHEDULERS["pbs"], ORIGIN, RUN_ID).splitlines()
    assert "launch -N 2 --doctor" in lines
    assert "#PBS -l select=2" in lines


@pytest.mark.parametrize(("nodes", "hours"), [(91, 2), (92, 6), (183, 6), (184, 12)])
def test_hours_by_nodes(nodes: int, hours: int) -> None:
    words = ["-N", str(nodes), "--account", "X", "--queue", "batch", "--walltime"]
    assert f"#SBATCH --time={hours}:00:00" in written("frontier", *words, f"{hours}:00:00")
    with pytest.raises(ConfigError, match=f"frontier's queue batch ends jobs of {nodes} nodes after {hours} h"):
        written("frontier", *words, f"{hours}:00:01")


def test_cores_that_the_site_has_fixed() -> None:
    with pytest.raises(ConfigError, match=r"--cores 18: the file of baskerville says --cpus-per-gpu=36"):
        written("baskerville", "--walltime", "1:00:00", "--account", "X", "--queue", "arc", "--cores", "18")


def test_no_gpus_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="--gpus 1: a node of crux has no GPUs"):
        written("crux", "--walltime", "1:00:00", "--account", "X", "--queue", "debug", "--gpus", "1")


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
    assert submit(SCHEDULERS["pbs"], "job.sh", 3, env) == ["1.server", "2.server", "3.server"]
    assert (tmp_path / "calls").read_text().splitlines() == [
        "job.sh",
        "-W depend=afterany:1.server job.sh",
        "-W depend=afterany:2.server job.sh",
    ]
    assert [shlex.join(words) for words in commands(SCHEDULERS["pbs"], "job.sh", ["1.server", "2.server"])] == [
        "qsub job.sh",
        "qsub -W depend=afterany:1.server job.sh",
    ]
    assert SCHEDULERS["slurm"].submit_command("job.sh", "17") == [
        "sbatch",
        "--parsable",
        "--dependency=afterany:17",
        "job.sh",
    ]


def test_a_scheduler_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "qsub", "echo 'qsub: no such project' >&2; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        SubmitError, match=r"(?s)qsub job.sh rejected the job \(exit status 9\):\nqsub: no such project"
    ):
        submit(SCHEDULERS["pbs"], "job.sh", 1, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    words = [
        LAUNCH,
        "--submit",
        "--site",
        "polaris",
        "--queue",
        "debug",
        "--walltime",
        "1:00:00",
        "--account",
        "X",
        "true",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "launch: qsub: no such project" in done.stderr
    dry = subprocess.run([*words[:2], "--dry-run", *words[2:]], capture_output=True, text=True)
    assert dry.stdout.startswith("#!/bin/bash --login\n# ALCF Polaris")
    assert re.search(r"^export WORDRUN_RUN_ID=\d{8}-\d{6}-[0-9a-f]{4}$", dry.stdout, re.MULTILINE)
    env = {**os.environ, "WORDRUN_RUN_ID": RUN_ID}
    dry = subprocess.run([*words[:2], "--dry-run", *words[2:]], capture_output=True, text=True, env=env)
    assert f"\nexport WORDRUN_RUN_ID={RUN_ID}\n" in dry.stdout


def test_json_for_scripts(tmp_path: Path) -> None:
    program(tmp_path, "qsub", 'echo "$*" >> calls; echo "$(wc -l < calls).server"')
    env = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "WORDRUN_RUN_ID": RUN_ID}
    words = [LAUNCH, "--submit", "--no-freeze", "--json", "--scheduler", "pbs", "--walltime", "1:00:00", "--chain", "2"]
    got = []
    for more in (["--dry-run", "true"], ["true"]):
        done = subprocess.run([*words, *more], capture_output=True, text=True, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        got.append(json.loads(done.stdout))
        assert (tmp_path / "calls").exists() == (more == ["true"])
    dry, real = got
    assert dry.keys() == real.keys()
    assert {name: dry[name] for name in ("site", "scheduler", "run_id", "jobs")} == {
        "site": None,
        "scheduler": "pbs",
        "run_id": RUN_ID,
        "jobs": [],
    }
    assert dry["commands"] == [["qsub", dry["path"]], ["qsub", "-W", "depend=afterany:JOB1", dry["path"]]]
    assert real["jobs"] == ["1.server", "2.server"]
    assert [shlex.join(words[1:]) for words in real["commands"]] == (tmp_path / "calls").read_text().splitlines()
    assert (tmp_path / real["path"]).read_text() == real["script"]
    names = [str(Path(each["path"]).with_suffix("")) for each in got]  # by the time of submission
    assert real["script"] == dry["script"].replace(*names)


@pytest.mark.parametrize("name", ["outputs", "outputs/jobs"])
def test_a_file_where_the_script_should_go(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    words = [LAUNCH, "--submit", "--scheduler", "pbs", "--walltime", "1:00:00", "true"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"launch: cannot write the job script outputs/jobs/\S+: {name} is not a folder; move it away; or call launch "
        rf"from a folder other than {tmp_path}\nlaunch: more: docs/launch.md#submit\n",
        done.stderr.replace("\nlaunch:   ", "; "),  # a long message is several lines
    )


def test_a_full_disk_leaves_no_script(tmp_path: Path) -> None:
    (tmp_path / "job.sh").symlink_to("/dev/full")
    with pytest.raises(
        ConfigError, match=r"No space left on device \(the disk, or your quota of it, is full\); or call"
    ):
        write(str(tmp_path / "job.sh"), "#!/bin/bash\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["pbs", "slurm"])
def test_jobs_get_the_shells_variables(name: str) -> None:
    """qsub passes none, and sbatch does not either with SBATCH_EXPORT=NONE."""
    env = {"WORDRUN_DATA_HOME": "data", "HF_HOME": "/h f", "WANDB_MODE": "offline", "WANDB_API_KEY": "secret", "A": "b"}
    options = parse(["--submit", "--walltime", "1:00:00", "--", "true"])
    text = script(options, UNKNOWN, SCHEDULERS[name], replace(ORIGIN, env=env), RUN_ID)
    given = [line for line in text.splitlines() if line.startswith("export ") and "WORDRUN_R" not in line][1:]
    expected = ["WORDRUN_DATA_HOME='/p/my runs/data'", "HF_HOME='/h f'", "WANDB_MODE=offline"]
    assert given == [f"export {each}" for each in expected]
    assert "secret" not in text
