"""``launch`` succeeds only if every rank has ended by itself with status 0 and, if it runs wordrun, has finished."""

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
    from conftest import Command

pytestmark = pytest.mark.mpi

BIN = Path(sys.prefix) / "bin"
LAUNCH = str(BIN / "launch")
# Rank 0 does what the argument says when rank 1 has ended.
AFTER = "[ $RANK = 1 ] && exit; while ! grep -q 1 $WORDRUN_STATUS_DIR/ended-*; do sleep 0.05; done; "
STOPPER = '''
import ctypes, os, sys
from dataclasses import dataclass

import wordrun
from wordrun.cli import main
from wordrun.config import HookConfig
from wordrun.train.hooks import Hook

@dataclass
class StopperConfig(HookConfig):
    """Ends a rank in the midst of training."""

    how: str = ""
    """A statement."""

class Stopper(Hook):
    def __init__(self, options):
        self.how = options.how

    def setup(self, trainer):
        if trainer.world.rank == 1 and self.how.startswith("raise"):
            exec(self.how)

    def after_step(self, trainer):
        if trainer.step == 2 and trainer.world.rank == trainer.world.size - 1:
            exec(self.how)

if __name__ == "__main__":
    wordrun.register("hooks", "stopper", "stopper:StopperConfig", "stopper:Stopper")
    if sys.argv[1] == "api":
        with wordrun.Trainer(wordrun.compose(sys.argv[2:])) as trainer:
            trainer.train()
    else:
        sys.exit(main())
'''
SMALL = shlex.split("""
    model=nano
    data=sample train.max_iters=4 train.dtype=fp32 train.device=cpu tracker=jsonl train.eval_iters=1
    train.sample_tokens=0 model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=16
    model.batch_size=2 hooks=[stopper]
""")
HOOK = "hooks=stopper (stopper): Stopper failed"
UNFINISHED = "ended with exit status 0, but wordrun had not finished"


def record(folder: Path) -> dict[str, Any]:
    records = [*folder.glob("outputs/*/*/*/launch.json"), *folder.glob("state/wordrun/launches/*.json")]
    (path,) = {path.resolve() for path in records}  # of runs there are links
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def launch_with(mpiexec: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run launch with a script in place of Hydra's mpiexec; REAL in it stands for that."""
    path = folder / "mpiexec"
    path.write_text(f'#!/bin/sh\n[ "$1" = -n ] || exec {BIN}/mpiexec "$@"\n{mpiexec.replace("REAL", f"{BIN}/mpiexec")}')
    path.chmod(0o755)
    imports = "import sys; from wordrun.launch import cli; from wordrun.launch.launchers import base"
    code = f"{imports}; base.own_bin = lambda: {str(folder)!r}; sys.exit(cli.main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.parametrize("options", [[], ["--retries", "1"]])
def test_a_launcher_that_returns_0_for_ranks_that_were_killed(options: list[str], tmp_path: Path) -> None:
    script = 'REAL "$@" >/dev/null 2>&1; exit 0'  # it says nothing either
    done = launch_with(script, tmp_path, *options, "-n", "2", "sh", "-c", f"{AFTER} kill -9 0")
    assert done.returncode == 1
    said = ["hydra returned 0, but rank 0 did not end by itself: killed, or without a report"]
    said += ["rank 1 had ended with exit status 0"]
    assert "".join(f"launch: {line}\n" for line in said) in done.stderr
    assert done.stderr.count("launch: starting") == 1
    kept = record(tmp_path)
    assert (kept["exit_status"], kept["failure"].split("\n")) == (1, said)


@pytest.mark.parametrize("launcher", [["--launcher", "hydra"], ["--launcher", "torchrun"], ["--elastic"]])
def test_ranks_that_had_ended_before_another_failed_are_named(
    launcher: list[str], command: Command, tmp_path: Path
) -> None:
    done = command(LAUNCH, *launcher, "-n", "2", "sh", "-c", f"{AFTER} exit 3")
    assert done.returncode == 3
    assert "launch: rank 0 ended with exit status 3\nlaunch: rank 1 had ended with exit status 0\n" in done.stderr
    assert record(tmp_path)["failure"].startswith("rank 0 ended with exit status 3")


def test_a_rank_is_named_whose_shell_is_killed(command: Command, tmp_path: Path) -> None:
    """Nobody reports its end; mpiexec names a process, and not the one that was killed first."""
    done = command(LAUNCH, "-n", "2", "sh", "-c", 'sleep 1; [ $RANK = 0 ] || kill -9 "$PPID"; sleep 5')
    assert done.returncode == 9
    said = "rank 1: its rank_env.sh, the shell that reports how it ends, was killed"
    assert f"launch: {said}\n" in done.stderr
    assert record(tmp_path)["failure"].split("\n")[0] == said


def test_a_rank_that_launch_stops_after_another_failed_has_saved_nothing(command: Command) -> None:
    """As wordrun's ranks say that are still loading torch."""
    code = "[ $RANK = 0 ] && exit 3; trap 'exit 75' TERM; while :; do sleep 0.1; done"
    done = command(LAUNCH, "-n", "2", "sh", "-c", code)
    assert done.returncode == 3
    assert "launch: stopping the other ranks\n" in done.stderr
    assert "saved" not in done.stderr


def test_mpi_that_kills_for_a_rank_that_left_without_finalizing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text(
        "import os\nfrom mpi4py.MPI import COMM_WORLD as comm\ncomm.rank == 1 and os._exit(0)\ncomm.recv(source=1)\n"
    )
    done = command(LAUNCH, "-n", "2", sys.executable, "leave.py")
    assert done.returncode in (1, 9)  # mpiexec returns 0 or 9
    assert "launch: rank 1 had ended with exit status 0\n" in done.stderr


def both(done: str) -> str:
    """Return a command with which each of two ranks waits until the other has come as far as this one."""
    return f"touch {done}$RANK; while [ ! -e {done}0 ] || [ ! -e {done}1 ]; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["--env", "WORDRUN_STATUS_DIR=/nonexistent", "--hostfile", "hosts"], ""),
        (["--env", "WORDRUN_STATUS_DIR=/nonexistent", "--hostfile", "hosts", "--launcher-args", "-prepend-rank"], ""),
        ([], "rm -rf $WORDRUN_STATUS_DIR; "),
    ],
    ids=["not on the rank's host", "with labels", "removed"],
)
def test_without_the_folder_ranks_report_through_the_launcher(
    words: list[str], script: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    for status in (0, 3):
        (tmp_path / f"{status}").mkdir()  # here ranks wait until both have begun, and until both have printed
        after = f"printf unfinished >&2; {both('printed')}; exit $((RANK * {status}))"
        code = f"cd {tmp_path}/{status}; {both('begun')}; {script}{after}"
        done = command(LAUNCH, *words, "-n", "2", "sh", "-c", code)
        assert done.returncode == status
        assert ("launch: rank 1 ended with exit status 3\n" in done.stderr) == bool(status)
        assert done.stderr.count("unfinished") >= 2
        assert not re.search(r"launch \d", done.stderr)


def forked(*values: Any) -> Any:
    """Return a case that differs from the first two in what wordrun does, not in how the process ends."""
    return pytest.param(*values, marks=pytest.mark.forked_programs)


@pytest.mark.parametrize(
    ("words", "program", "how", "says"),
    [
        (["-n", "2", "--retries", "1"], "train", "os._exit(0)", f"launch: rank 1 {UNFINISHED}"),
        (["-n", "2", "--elastic"], "train", "ctypes.CDLL(None).exit(0)", f"launch: rank 1 {UNFINISHED}"),
        forked(["-n", "2", "--launcher", "torchrun"], "api", "os._exit(0)", f"launch: rank 1 {UNFINISHED}"),
        forked(["-n", "1"], "train", "os._exit(0)", f"launch: COMMAND {UNFINISHED}"),
        forked(["-n", "2"], "train", "sys.exit(0)", f"[rank 1] {HOOK}: RuntimeError: sys.exit(0)"),
        forked(["-n", "2"], "train", "raise SystemExit", f"[rank 1] {HOOK}: RuntimeError: sys.exit(0)"),
        forked(["-n", "1"], "api", "sys.exit()", f"{HOOK}: RuntimeError: sys.exit(0)"),
    ],
)
def test_a_rank_that_leaves_training_with_status_0(
    words: list[str], program: str, how: str, says: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "stopper.py").write_text(STOPPER)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = [LAUNCH, *words, sys.executable, "stopper.py", program, *SMALL]
    done = command(*run, f"hooks.stopper.how='{how}'", TMPDIR=str(temporary))
    assert done.returncode == 1, done.stderr
    assert says in done.stderr
    assert done.stderr.count("launch: starting") <= 1
    kept = record(tmp_path)
    assert kept["exit_status"] == 1
    assert says.startswith("launch: ") is (UNFINISHED in (kept["failure"] or ""))
    assert not [*temporary.glob("wordrun-*")]


@pytest.mark.forked_programs
@pytest.mark.parametrize("words", [["--help"], ["train", "--version"], ["--cfg", "job"], ["--hydra-help"]])
def test_commands_that_end_early_have_finished(words: list[str], command: Command) -> None:
    done = command(LAUNCH, "-n", "2", str(BIN / "wordrun"), *words)
    assert done.returncode == 0, done.stderr


def test_a_launch_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    launch = [LAUNCH, "--launcher", "hydra", "-n", "2"]
    with subprocess.Popen([*launch, "sleep", "60"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as killed:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("wordrun-launch-*/*.pid"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("wordrun-*"))
    subprocess.run([*launch, "true"], cwd=tmp_path, env=env, check=True)
    assert not list(tmp_path.glob("wordrun-*"))
