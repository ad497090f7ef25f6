"""The commands that a run and ``launch`` suggest work when they are pasted."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import stand_in

if TYPE_CHECKING:
    from conftest import Command, Start

SMALL = ["data=sample", "train=smoke", "tracker=jsonl", "model.n_layer=2", "model.n_embd=32", "train.eval_iters=1"]
WORDRUN = ("python", "-m", "wordrun", *SMALL)
LONG = ("train.max_iters=100000", "train.checkpoint_interval=5", "train.eval_interval=0", "optimizer.lr_decay_iters=9")


def suggested(text: str, after: str) -> list[str]:
    """Return the indented lines that follow the last one with ``after``."""
    lines = text[text.rindex(after) :].splitlines()[1:]
    return [line for line in lines if line.startswith("  ")]


def run_dir(cwd: Path) -> Path:
    """Return the only run directory below ``cwd``."""
    (path,) = cwd.glob("outputs/*/*/*/run.json")
    return path.parent


@pytest.mark.forked_programs
def test_after_the_last_step(command: Command, tmp_path: Path) -> None:
    done = command("launch", *WORDRUN, "train.max_iters=4")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_dir(tmp_path)
    lines = suggested((folder / "log.txt").read_text(), "next: ")
    assert lines == suggested(done.stdout, "next: ")
    said = [command("sh", "-c", line) for line in lines]
    assert [done.returncode for done in said] == [0, 0, 0], [done.stderr for done in said]
    assert "trained for 4 steps on 8,192 tokens; validation loss " in said[0].stderr
    assert (tmp_path / said[1].stdout.strip() / "config.json").exists()
    assert json.loads((folder / "run.json").read_text())["steps"] == 8


@pytest.fixture
def continues(
    command: Command, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Continue the run by a line, for a few steps; only the program that began it was started as users start it."""

    def run(line: str) -> None:
        monkeypatch.setenv(stand_in.VARIABLE, str(programs))
        folder = run_dir(tmp_path)
        # Not the link "latest", which follows when the folder has been synchronized: a kill may come between the two.
        step = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
        done = command("sh", "-c", f"{line} train.max_iters={step + 3}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"at step {step}" in done.stdout
        assert json.loads((folder / "run.json").read_text())["steps"] == step + 3

    return run


def test_after_a_signal(start: Start, continues: Callable[[str], None], tmp_path: Path) -> None:
    job = start("launch", *WORDRUN, *LONG)
    while not list(tmp_path.glob("outputs/*/*/*/checkpoints/latest")):
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 75, out + err
    (line,) = suggested((run_dir(tmp_path) / "log.txt").read_text(), "to continue from step ")
    assert line in out
    assert "to continue" not in err
    continues(line)


# Rank 1 is killed once, after the first checkpoint, by its main thread: not while rank 0 reads its memory, because then
# MPICH may end all before its status is known.
KILLED = """
import _thread, glob, os, signal, sys, threading, time
from wordrun import cli

def kill():
    while not glob.glob("outputs/*/*/*/checkpoints/latest"):
        time.sleep(0.05)
    open("killed", "w").close()
    _thread.interrupt_main(signal.SIGALRM)

if os.environ["RANK"] == "1" and not os.path.exists("killed"):
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    threading.Thread(target=kill, daemon=True).start()
sys.exit(cli.main(sys.argv[1:]))
"""


def test_after_a_rank_was_killed(command: Command, continues: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    done = command("launch", "-n", "2", "python", "train.py", *SMALL, *LONG)
    assert done.returncode == 137, f"{done.returncode}\n{done.stderr}{done.stdout}"
    (line,) = suggested(done.stderr, "launch: to continue from the last checkpoint:")
    assert re.match(r"  WORDRUN_RUN_ID=\S+ WORDRUN_RESUME=auto launch -n 2 python train\.py", line)
    continues(line)
