"""What the trainings of soak.py are, and how far they are."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE_S = 90
# A rank that has the memory of its node: that of its guardian, whose number is its rank, or the end of what launch says
# to one that replaces another. While there is a file, memory is full.
RANK = """
import os, sys
from pathlib import Path
environ = Path(f"/proc/{os.getppid()}/environ").read_text().split(chr(0))
guardian = dict(line.partition("=")[::2] for line in environ)
node = (guardian["WORDRUN_GUARDIAN_TOKEN"].split() + [guardian.get("RANK")])[3]
base = sys.argv.pop(1)
os.environ["WORDRUN_SHM"] = f"{base}{node}"
os.makedirs(os.environ["WORDRUN_SHM"], exist_ok=True)
from wordrun.checkpoint.memory.node import NodeMemory
from wordrun.cli import main
from wordrun.train.evaluation import Evaluation
free, measure = NodeMemory.free, Evaluation.measure
def measured(*args):
    mark = Path(f"{base}.evaluating.{os.getpid()}")
    mark.touch()
    try:
        return measure(*args)
    finally:
        mark.unlink()
Evaluation.measure = measured
NodeMemory.free = lambda memory: 0 if os.path.exists(f"{base}.full") else free(memory)
sys.exit(main())
"""


def command(folder: Path, text: Path, steps: int, *, memory: bool = False, elastic: int = 0) -> list[str]:
    """Return the command that trains, or goes on; ``elastic`` is the number of ranks under guardians."""
    python = [sys.executable]
    if elastic:
        words = command(folder, text, steps, memory=True)
        # Its name is what tells guardians to import what ranks of wordrun need.
        hosts, script = folder.with_suffix(".hosts"), folder.with_suffix(".command") / "wordrun"
        hosts.write_text(f"{os.uname().nodename}\nlocalhost\n")
        script.parent.mkdir(exist_ok=True)
        script.write_text(RANK)
        return [
            *words[:2],
            str(elastic),
            *shlex.split("--elastic --retries 100000 --hostfile"),
            str(hosts),
            "--launcher-args",
            "-launcher fork",
            "--oversubscribe",
            sys.executable,
            str(script),
            f"{folder.with_suffix('.node')}",
            *words[words.index("wordrun") + 1 :],
            "train.eval_interval=7",
            "train.eval_iters=2",
            "train.save_best=false",
        ]
    if memory:  # each rank gets the memory of its node
        node = folder.with_suffix(".node")
        script = f'export WORDRUN_SHM="{node}$RANK"; mkdir -p "$WORDRUN_SHM"; exec "$@"'
        python = ["sh", "-c", script, "sh", sys.executable]
    return [
        str(Path(sys.executable).with_name("launch")),
        *shlex.split("-n 2 --env OMP_NUM_THREADS=1"),
        *python,
        "-m",
        "wordrun",
        *(["train.memory_checkpoint_interval=2", "train.backend=FSDP"] if memory else []),
        "data=text",
        "tokenizer=char",
        f"data.path={text}",
        f"hydra.run.dir={folder}",
        "tracker=jsonl",
        "train.resume=auto",
        f"train.max_iters={steps}",
        "train.log_interval=1",
        "train.eval_interval=0",
        f"train.checkpoint_interval={20 if memory else 5}",
        *shlex.split("""
        model=nano
        train.sample_tokens=0 train.dtype=fp32 train.device=cpu model.n_layer=2 model.n_embd=64
        model.n_head=2 model.block_size=32 model.batch_size=4 model.dropout=0.1
        optimizer.warmup_iters=10
    """),
    ]


def options(words: list[str]) -> list[str]:
    """Return the options of the training in a command."""
    before = max(at for at, word in enumerate(words) if word == "wordrun" or word.endswith(".node"))
    return words[before + 1 :]


def last_step(folder: Path) -> int:
    """Return the last step in a run's metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError):  # not there, empty, or half a line
        return 0


def saving(folder: Path) -> bool:
    """Say whether a checkpoint is being written, on disk or in memory."""
    return any(folder.glob("checkpoints/.step-*")) or any(folder.parent.glob(f"{folder.name}.node*/*/*/.step-*"))


def evaluating(folder: Path) -> bool:
    """Say whether a rank evaluates."""
    marks = folder.parent.glob(f"{folder.name}.node.evaluating.*")
    return any(os.path.exists(f"/proc/{mark.suffix[1:]}") for mark in marks)


def recovered(folder: Path, since: float) -> bool:
    """Say whether ranks have taken a step since a fault at the time ``since``, in seconds since the epoch."""
    try:
        found = json.loads((folder / "run.json").read_text()).get("recoveries", [])
    except (OSError, ValueError):
        return False
    return any(fault["time"] >= since and fault["seconds"] is not None for fault in found)


def environment(pid: int) -> bytes:
    """Return the variables of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def wait_for(condition: Any, process: subprocess.Popen[Any], seconds: float = PATIENCE_S, pause: float = 0.01) -> bool:
    """Wait until ``condition()``, asked for after each ``pause``; say whether it came before the process ended."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def wait_until_gone(ranks: list[int], seconds: float, victim: str) -> None:
    """Wait until all ``ranks`` have ended; raise SystemExit if any is left after ``seconds``."""
    end = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        if time.monotonic() > end:
            raise SystemExit(f"ranks are left {seconds:g} s after {victim} had been killed")
        time.sleep(0.01)


def living(folder: Path) -> list[int]:
    """Return the process IDs of a run's ranks, in order; none if one of them has ended."""
    try:
        pids: list[int] = json.loads((folder / "launch.json").read_text()).get("pids", [])
    except (OSError, ValueError):  # it is being moved
        return []
    return pids if all(os.path.exists(f"/proc/{pid}") for pid in pids) else []


def children(pid: int) -> list[int]:
    """Return the process IDs of a process's children."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def guardians_below(pid: int) -> list[int]:
    """Return the guardians that ``launch`` with this pid has started, without the ranks that they have forked."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            is_one = b"wordrun.launch.elastic.guardian" in Path(f"/proc/{child}/cmdline").read_bytes()
            own = is_one and "python" in Path(f"/proc/{child}/comm").read_text()
            found += [child] if own else guardians_below(child)
    return found


def ranks_below(pid: int) -> list[int]:
    """Return the Python processes that ``launch`` with this pid has started."""
    found, todo = [], [pid]
    while todo:
        below = children(todo.pop())
        todo += below
        with contextlib.suppress(OSError):
            found += [each for each in below if b"\0-m\0wordrun\0" in Path(f"/proc/{each}/cmdline").read_bytes()]
    # launch's own command line holds the same words.
    return [pid for pid in found if "python" in Path(f"/proc/{pid}/comm").read_text()]


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to those processes that have not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def parent(pid: int) -> int:
    """Return the process ID of a process's parent; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def node_of(guardian: int) -> int | None:
    """Return the number of a guardian's node, as RANK does; None if it has ended."""
    lines = environment(guardian).decode().split("\0")
    found = dict(line.partition("=")[::2] for line in lines)
    token = found.get("WORDRUN_GUARDIAN_TOKEN")
    return None if token is None else int([*token.split(), found.get("RANK", "0")][3])


def finish(folder: Path, words: list[str]) -> None:
    """Let a training run to its end."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{folder.name} did not finish:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def compare(home: Path, steps: int) -> None:
    """Compare the losses of the training that was disturbed with those of the other, to the bit."""
    mine = figures(home / "run")
    if mine != figures(home / "whole"):
        raise SystemExit(f"the losses in {home / 'run'} are not those in {home / 'whole'}")
    if [line[0] for line in mine if len(line) > 2] != [*range(1, steps + 1)]:
        raise SystemExit(f"{home / 'run'} has not one line for each of its {steps} steps")
    if left := list(home.glob("*.node*/*/*")):
        raise SystemExit(f"checkpoints are left in memory: {left}")


KEYS = ("step", "loss", "lr", "grad_norm", "tokens", "val_loss")
"""Figures of a step, or of an evaluation, which has a line of its own."""


def figures(folder: Path) -> list[tuple[Any, ...]]:
    """Return what does not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[key] for key in KEYS if key in line) for line in lines]


def sources(folder: Path) -> list[str]:
    """Return from where each launch resumed: memory or disk."""
    record = json.loads((folder / "run.json").read_text())
    return [part["resumed_from"]["source"] for part in [*record["earlier"], record] if "resumed_from" in part]
