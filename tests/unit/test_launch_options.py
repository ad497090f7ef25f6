"""The command line of ``launch``: what it reads, what it leaves to COMMAND, what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from wordrun.common.errors import ConfigError
from wordrun.launch.options import Options
from wordrun.launch.parser import GROUPS, help_text, parse
from wordrun.launch.wordrun_command import arguments_of_wordrun

pytestmark = pytest.mark.unit

LAUNCH = str(Path(sys.prefix) / "bin" / "launch")


def launch(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAUNCH, *words], capture_output=True, text=True, timeout=90, cwd=cwd)


def test_parsing_stops_at_the_command() -> None:
    options = parse(["-n", "2", "python", "-n", "3", "--timeout", "4", "--help", "--", "-x"])
    assert options == Options(np=2, command=("python", "-n", "3", "--timeout", "4", "--help", "--", "-x"))


@pytest.mark.parametrize("words", [["--", "-n", "3"], ["--np=2", "--", "-n", "3"]])
def test_two_dashes_end_the_options(words: list[str]) -> None:
    assert parse(words).command == ("-n", "3")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("wordrun", []),
        ("/venv/bin/wordrun data=sample", ["data=sample"]),
        ("python -m wordrun", []),
        ("python3.11 -um wordrun a=1", ["a=1"]),
        ("python3.13t -mwordrun a=1", ["a=1"]),
        ("python -X importtime -W ignore -m wordrun train a=1", ["train", "a=1"]),
        ("python --check-hash-based-pycs default -Xdev -m wordrun -m a=1,2", ["-m", "a=1,2"]),
        ("python -u -m wordrun study scaling", ["study", "scaling"]),
        ("python train.py --project wordrun lr=1", None),
        ("python train.py -m wordrun lr=1", None),
        ("python train.py --out /scratch/wordrun x=1", None),
        ("python -c pass -m wordrun", None),
        ("python - -m wordrun", None),
        ("python -m torch.distributed.run -m wordrun a=1", None),
        ("python -m wordrun_of_mine a=1", None),
        ("python -W -m wordrun", None),
        ("python", None),
        ("mpirun wordrun a=1", None),
        ("sh -c wordrun", None),
    ],
)
def test_only_wordrun_itself_is_taken_for_wordrun(command: str, arguments: list[str] | None) -> None:
    found = arguments_of_wordrun(command.split())
    assert (None if found is None else [*found]) == arguments
    options = parse(["-n", "2", *command.split()])
    assert options.runs_wordrun is (arguments is not None)
    assert options.trains is (arguments is not None and arguments[:1] != ["study"])


def test_every_option_is_read() -> None:
    words = [
        "-n",
        "4",
        "-N",
        "1",
        "--ppn=4",
        "--hostfile",
        "F",
        "--site",
        "S",
        "--scheduler",
        "none",
        "--launcher",
        "hydra",
        "--oversubscribe",
        "--cpu-bind",
        "core",
        "--env",
        "A=1",
        "--env",
        "B=x=y",
        "--env",
        "C=",
        "--dry-run",
        "--json",
        "--info",
        "--idle-timeout",
        "1.5",
        "--help",
        "--version",
    ]
    options = parse([*words, "--launcher-args", "-a 'b c'", "run"])
    assert options == Options(
        np=4,
        nodes=1,
        ppn=4,
        hostfile="F",
        site="S",
        scheduler="none",
        launcher="hydra",
        oversubscribe=True,
        cpu_bind="core",
        env=(("A", "1"), ("B", "x=y"), ("C", "")),
        launcher_args=("-a", "b c"),
        dry_run=True,
        json=True,
        info=True,
        idle_timeout=1.5,
        help=True,
        version=True,
        command=("run",),
    )


def test_a_number_may_follow_its_letter_as_for_srun() -> None:
    assert parse(["-N2", "-n4", "x", "-n9"]) == Options(nodes=2, np=4, command=("x", "-n9"))
    assert parse(["-n=4", "x"]).np == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "0", "x"], "-n 0 should be a whole number, at least 1"),
        (["-n", "-2", "x"], "-n -2 should be a whole number, at least 1"),
        (["--np", "two", "x"], "--np two should be a whole number, at least 1"),
        (["--ppn", "1.5", "x"], "--ppn 1.5 should be a whole number, at least 1"),
        (["-n"], "-n needs a value: -n N"),
        (["--dryrun", "x"], "unknown option '--dryrun'; did you mean '--dry-run'? (launch --help lists the options)"),
        (["--dry", "x"], "unknown option '--dry'"),  # no abbreviations
        (["-np", "2", "x"], "unknown option '-np'; did you mean '--np'?"),
        (["--ntasks=4", "x"], "unknown option '--ntasks'; did you mean '--np'?"),
        (["--ntasks-per-node", "2", "x"], "unknown option '--ntasks-per-node'; did you mean '--ppn'?"),
        (["-t", "10", "x"], "unknown option '-t'; did you mean '--walltime'?"),
        (["-N2-4", "x"], "-N 2-4 should be a whole number, at least 1"),
        (["--relaunch", "3", "x"], "unknown option '--relaunch'"),
        (["--launcher", "hidra", "x"], "should be one of pals, hydra, openmpi, srun, torchrun, local; did you mean 'h"),
        (["--scheduler", "lsf", "x"], "--scheduler lsf should be one of pbs, slurm, none"),
        (["--env", "A", "x"], "--env A: should be NAME=VALUE"),
        (["--env", "A-B=1", "x"], "--env A-B=1: should be NAME=VALUE"),
        (["--env", "RANK=1", "x"], "launch sets RANK for each rank"),
        (["--launcher-args", "'a", "x"], "cannot be split into arguments"),
        (["--idle-timeout", "0", "x"], "--idle-timeout 0 should be a positive number of seconds"),
        (["--idle-timeout", "nan", "x"], "should be a positive number of seconds"),
        (["--hang", "0", "x"], "--hang 0 should be a positive number of seconds"),
        (["--stacks"], "--stacks needs a value: --stacks RUN"),
        (["--dry-run=1", "x"], "--dry-run takes no value"),
        (["--json", "x"], "--json requires --dry-run, --info, --doctor or --submit"),
    ],
)
def test_refusals_name_the_option_and_the_way_out(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["-n", "0", "--ppn", "x", "--env", "A", "run"])
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(ConfigError) as caught:
        parse(["--submit", "--job-name", "a b", "--account", "x\ny", "--queue", "", "--filesystems", "a,b", "run"])
    assert str(caught.value).splitlines() == [
        "--job-name 'a b' should be up to 100 letters, digits and . _ + -, the first a letter or digit",
        r"--account 'x\ny' should be a name of letters, digits and . _ + - @ : /",
        "--queue '' should be one or more names, separated by commas, of letters, digits and . _ + - @ : /",
        "--filesystems a,b should be names separated by colons, such as home:eagle",
    ]


@pytest.mark.parametrize("columns", [80, 110])
def test_help_explains_every_option(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text()
    joined = " ".join(text.split())
    for group in GROUPS.values():
        for option in group:
            assert all(name in text for name in option.names)
            assert option.help in joined
    assert max(len(line) for line in text.splitlines()) <= columns


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "launch: COMMAND is missing, for example: launch -n 2 python train.py (launch --help lists "),
        (["-n", "2"], 2, "launch: COMMAND is missing, for example: launch -n 2 python train.py (launch --help lists "),
        (["-n", "0", "true"], 2, "launch: -n 0 should be"),
        (["-n", "3", "--ppn", "2", "true"], 2, "launch: -n 3 --ppn 2: 3 ranks cannot be divided into nodes of 2"),
        (["-n", "4", "--ppn", "2", "true"], 2, "launch: -n 4 --ppn 2: 4 ranks need 2 nodes of 2, and this"),
        (["-N", "2", "true"], 2, "launch: -N 2: this machine is 1 node; -N 1, or no -N, would fit"),
        (["-n", "2", "--launcher", "local", "true"], 2, "launch: --launcher local starts one process, not 2"),
        (["-n", "100000", "true"], 2, "launch: -n 100000: 100000 ranks on "),
        (["--dry-run", "-n", "100000", "true"], 2, "launch: -n 100000: 100000 ranks on "),
        (["--launcher", "srun", "true"], 2, "launch: --launcher srun: SLURM_JOB_ID is not set"),
        (["--launcher", "pals", "true"], 2, "launch: --launcher pals: no mpiexec of pals: none next to this Python"),
        (["--scheduler", "pbs", "true"], 2, "launch: --scheduler pbs: PBS_JOBID is not set"),
        (["--site", "polarys", "true"], 2, "launch: --site polarys is neither a file nor one of aurora,"),
        (["--hostfile", "hosts", "true"], 2, "launch: --hostfile=hosts cannot be read: No such file or directory"),
        (["--env", "MASTER_PORT=70000", "true"], 2, "launch: --env MASTER_PORT=70000: a port is a number"),
        (["--cpu-bind", "core", "true"], 2, "launch: --cpu-bind core: a single process has no CPU binding"),
        (["--launcher-args", "-x", "true"], 2, "launch: --launcher-args: a single process is started without"),
        (["-n", "2", "echo", "a", ":", "b"], 2, "launch: the argument ':' in the command"),
        (["no-such-command"], 127, "launch: no-such-command: command not found"),
        (["./none.py"], 127, "launch: ./none.py: command not found: no such file"),
    ],
)
def test_one_message_and_nothing_started(tmp_path: Path, words: Sequence[str], status: int, message: str) -> None:
    run = launch(*words, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (status, "")
    assert run.stderr.startswith(message), run.stderr
    assert not list(tmp_path.iterdir())


def test_help_and_version(tmp_path: Path) -> None:
    run = launch("--help", cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, help_text(complete=False) + "\n", "")
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", run.stdout, re.MULTILINE)
    often = "--np --nodes --ppn --retries --submit --walltime --queue --account --chain --dry-run --doctor --help"
    assert " ".join(shown) == often
    assert launch("--help", "all").stdout == help_text() + "\n"
    assert launch("--version").stdout.startswith("launch (wordrun) ")
    module = subprocess.run([sys.executable, "-m", "wordrun.launch", "--help"], capture_output=True, text=True)
    assert module.stdout == run.stdout


@pytest.mark.parametrize("words", [["--help"], ["--dry-run", "-n", "2", "true"], ["--dry-run", "--json", "true"]])
def test_heavy_modules_stay_out(tmp_path: Path, words: list[str]) -> None:
    code = (
        "import sys; from wordrun.launch.cli import main; assert main(sys.argv[1:]) == 0\n"
        "heavy = {'torch', 'mpi4py', 'hydra', 'omegaconf', 'rich', 'numpy', 'argparse'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    run = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not list(tmp_path.iterdir())
