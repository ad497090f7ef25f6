"""SIGTERM ends a command in any phase, also while C code runs, in which Python calls no handler."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun.common.sigint import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Start

    Words = list[str]

pytestmark = pytest.mark.forked_programs

# Runs a command, whose function TARGET waits instead of doing something. HOW: in C code that no signal interrupts; in
# Python, which calls handlers; likewise, but swallowing what they raise; or only for a moment.
SCRIPT = """
import ctypes, importlib, multiprocessing, os, sys, time
from pathlib import Path
target, how, *words = sys.argv[1:]
module, _, name = target.partition(":")
owner = importlib.import_module(module)
*path, last = name.split(".")
for each in path:
    owner = getattr(owner, each)
before = getattr(owner, last)

def wait(*args, **options):
    workers = [f"{each.pid}\\n" for each in multiprocessing.active_children()]
    with Path("workers").open("a") as file:
        file.writelines(workers)
    os.write(1, b"\\nreached\\n")
    if how == "c":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    if how == "moment":
        time.sleep(0.5)
        return before(*args, **options)
    try:
        time.sleep(60)
    except BaseException:
        if how != "swallowed":
            raise
    time.sleep(60)

setattr(owner, last, wait)
from wordrun import cli
sys.exit(cli.main(words))
"""
SMALL = shlex.split("""
    model=nano tracker=jsonl model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=8 model.batch_size=4
    train.eval_iters=2 train.sample_tokens=0 train.dtype=fp32 train.device=cpu tokenizer=char data=text
    data.path=fox.txt train.max_iters=40 train.log_interval=1 train.eval_interval=2 train.checkpoint_interval=3
    train.compile=false
""")
WORKERS = ("data.path=folder", "data.workers=1", "tokenizer=byte")
BEFORE = {
    "composing": ("wordrun.commands.train:compose", "c"),
    "composing in Python": ("wordrun.commands.train:compose", "python"),
    "composing, swallowed": ("wordrun.commands.train:compose", "swallowed"),
    "reading": ("wordrun.data.prepare.sources.files:FileSource.documents", "c"),
    "preparing": ("wordrun.data.prepare.tokenize:process", "c", "tokenizer=byte"),
    "preparing with workers": ("wordrun.data.prepare.workers:wait", "c", *WORKERS),
    "planning memory": ("wordrun.train.settle:MemoryPlan", "c"),
    "building": ("wordrun.backend:build", "c"),
}
"""Phases in which nothing is lost."""
WITHIN = {
    "compiling or training": "wordrun.train.trainer:Trainer._train_step",
    "evaluating": "wordrun.train.trainer:Trainer.measure",
    "saving": "wordrun.checkpoint.shards:write",
}
"""Phases that end with a checkpoint of the last step, after which a run can go on."""
AT_ONCE = {
    "preparing alone": ("wordrun.data.prepare.workers:wait", f"prepare data=text {' '.join(WORKERS)}"),
    "planning": ("wordrun.commands.plan:advise", "plan model=nano data=text data.path=fox.txt tokenizer=char"),
    "plots": ("wordrun.train.run:page.write", "train train.max_iters=2"),
    "generating": ("wordrun.model.generate:generate", "generate run=done prompt=T length=5 device=cpu"),
    "exporting": ("wordrun.commands.export:write_weights", "export run=done out=exported"),
    "reporting": ("wordrun.track.report.page:write", "report run=done"),
    "studying": ("wordrun.study.sweep:main", "sweep train.seed=1,2"),
}
"""Phases that the system ends."""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path) -> None:
    Path("folder").mkdir()
    for file in ("fox.txt", "folder/a.txt", "folder/b.txt"):
        Path(file).write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    Path("stop.py").write_text(SCRIPT)


def stopped(jobs: dict[str, subprocess.Popen[str]]) -> dict[str, tuple[float, int, str]]:
    """Send SIGTERM to each job when it has reached its phase; return how long it took [s], its status and errors."""
    found = {}
    for name, job in jobs.items():
        assert job.stdout
        if not any(line == "reached\n" for line in job.stdout):
            pytest.fail(f"{name}: {job.communicate()[1]}")
        job.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        errors = job.communicate(timeout=50)[1]
        found[name] = time.monotonic() - begun, job.returncode, errors
    return found


def check_workers_have_ended() -> None:
    """Fail unless the process that has prepared the data ends, whose parent has ended."""
    (pid,) = Path("workers").read_text().split()
    end = time.monotonic() + 5
    while Path("/proc", pid, "cwd").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_sigterm_before_the_first_step_ends_any_phase(start: Start) -> None:
    jobs = {
        name: start(sys.executable, "stop.py", target, how, *SMALL, f"hydra.run.dir={number}", *more)
        for number, (name, (target, how, *more)) in enumerate(BEFORE.items())
    }
    for name, (seconds, status, errors) in stopped(jobs).items():
        assert (status, errors) == (75, "stopped by SIGTERM before the first step (exit status 75)\n"), name
        assert seconds < PATIENCE_S + 5, name
        if BEFORE[name][1] == "python":
            assert seconds < PATIENCE_S, name
    check_workers_have_ended()
    again = start(sys.executable, "-m", "wordrun", *SMALL, "train.max_iters=1", "hydra.run.dir=again")
    assert again.communicate(timeout=60)[1] == ""  # no lock is left
    assert again.returncode == 0


def test_sigterm_during_a_step_an_evaluation_or_a_save_leaves_a_checkpoint(start: Start) -> None:
    jobs = {
        name: start(sys.executable, "stop.py", target, "moment", *SMALL, f"hydra.run.dir={number}")
        for number, (name, target) in enumerate(WITHIN.items())
    }
    for number, (name, (seconds, status, errors)) in enumerate(stopped(jobs).items()):
        assert (status, errors) == (75, ""), name
        assert seconds < 10, name
        assert json.loads(Path(str(number), "run.json").read_text())["exit_reason"] == "stopped by SIGTERM, saved", name


def test_sigterm_ends_other_commands_at_once(start: Start) -> None:
    done = start(sys.executable, "-m", "wordrun", *SMALL, "train.max_iters=1", "hydra.run.dir=done")
    assert done.wait(timeout=60) == 0
    jobs = {}
    for name, (target, command) in AT_ONCE.items():
        words = shlex.split(command)
        more = [*SMALL, "hydra.run.dir=drawn"] if words[0] == "train" else []
        jobs[name] = start(sys.executable, "stop.py", target, "c", words[0], *more, *words[1:])
    for name, (seconds, status, errors) in stopped(jobs).items():
        assert (status, "Traceback" in errors) == (-signal.SIGTERM, False), (name, errors)
        assert seconds < 5, name
    check_workers_have_ended()
    assert json.loads(Path("drawn/run.json").read_text())["exit_reason"] == "finished"
