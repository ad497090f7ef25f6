"""Kill a training over and over, let it go on each time, and see that it ends as if nothing had happened.

    python tests/soak.py --runs 30 --seed 0
    python tests/soak.py --runs 30 --seed 0 --memory

Each run kills one rank, all ranks or ``launch`` itself by SIGKILL, at a random moment of start, training or saving, and
starts the same command again with ``train.resume=auto``. After the last one the training is left to finish, and its
losses are compared with those of a training that nobody disturbed: to the bit.

With ``--memory``, the two ranks are on two simulated nodes and keep checkpoints in memory; now and then a node is lost
with its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VICTIMS = ("a rank", "all ranks", "launch")
NODE = "a node"
MOMENTS = ("training", "saving", "starting")
PATIENCE_S = 90


def command(folder: Path, text: Path, steps: int, *, memory: bool = False) -> list[str]:
    """Return the command that trains, or goes on."""
    python = [sys.executable]
    if memory:  # each rank gets the memory of its node
        node = folder.with_suffix(".node")
        script = f'export WORDRUN_SHM="{node}$RANK"; mkdir -p "$WORDRUN_SHM"; exec "$@"'
        python = ["sh", "-c", script, "sh", sys.executable]
    return [
        str(Path(sys.executable).with_name("launch")), "-n", "2", "--env", "OMP_NUM_THREADS=1", *python, "-m",
        "wordrun", *(["train.memory_checkpoint_interval=2", "train.backend=FSDP"] if memory else []), "data=text",
        "tokenizer=char", f"data.path={text}", f"hydra.run.dir={folder}", "tracker=jsonl",
        "train.resume=auto",
        f"train.max_iters={steps}", "train.log_interval=1", "train.eval_interval=0",
        f"train.checkpoint_interval={20 if memory else 5}",
        "train.sample_tokens=0", "train.dtype=fp32", "train.device=cpu", "model.n_layer=2", "model.n_embd=64",
        "model.n_head=2", "model.block_size=32", "model.batch_size=4", "model.dropout=0.1",
        "optimizer.warmup_iters=10",
    ]  # fmt: skip


def last_step(folder: Path) -> int:
    """Return the last step in a run's metrics."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):  # not there, empty, or half a line
        return 0


def saving(folder: Path) -> bool:
    """Say whether a checkpoint is being written, on disk or in memory."""
    return any(folder.glob("checkpoints/.step-*")) or any(folder.parent.glob(f"{folder.name}.node*/*/*/.step-*"))


def ranks_below(pid: int) -> list[int]:
    """Return the Python processes that ``launch`` with this pid has started."""
    found, todo = [], [pid]
    while todo:
        with contextlib.suppress(OSError):
            pid = todo.pop()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            todo += [int(child) for child in children]
            found += [int(c) for c in children if b"\0-m\0wordrun\0" in Path(f"/proc/{c}/cmdline").read_bytes()]
    # launch's own command line holds the same words.
    return [pid for pid in found if "python" in Path(f"/proc/{pid}/comm").read_text()]


def environment(pid: int) -> bytes:
    """Return the variables of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def wait_for(condition: Any, process: subprocess.Popen[Any], seconds: float = PATIENCE_S) -> bool:
    """Wait until ``condition()``; say whether it came before the process ended."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def disturb(words: list[str], folder: Path, victim: str, moment: str, dice: random.Random) -> str:
    """Start the command and kill ``victim`` at ``moment``; return what happened."""
    before = last_step(folder)
    with open(folder.with_suffix(".out"), "a") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    if moment == "starting":
        time.sleep(dice.uniform(0.1, 4))
    elif moment == "saving":
        target = before + dice.randint(1, 6)
        wait_for(lambda: last_step(folder) >= target and saving(folder), process)
    else:
        target = before + dice.randint(3, 12)
        wait_for(lambda: last_step(folder) >= target, process)
    wait_for(lambda: ranks_below(process.pid), process)
    step, in_save = last_step(folder), saving(folder)
    ranks = ranks_below(process.pid)
    variable = b"WORDRUN_SHM=%b0\0" % os.fsencode(folder.with_suffix(".node"))
    pids = {
        "a rank": dice.sample(ranks, min(1, len(ranks))), "all ranks": ranks, "launch": [process.pid],
        NODE: [pid for pid in ranks if variable in environment(pid)],
    }[victim]  # fmt: skip
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        status = process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(f"launch did not end within 30 s after {victim} had been killed") from None
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        if time.monotonic() > end:
            raise SystemExit(f"ranks are left 20 s after {victim} had been killed")
        time.sleep(0.01)
    if victim == NODE:
        shutil.rmtree(f"{folder.with_suffix('.node')}0", ignore_errors=True)
    where = " in a save" if in_save else ""
    return f"killed {victim} ({len(pids)}) while {moment}, after step {step}{where}: status {status}"


def figures(folder: Path) -> list[tuple[Any, ...]]:
    """Return what does not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")) for line in lines]


def sources(folder: Path) -> list[str]:
    """Return from where each launch resumed: memory or disk."""
    record = json.loads((folder / "run.json").read_text())
    return [part["resumed_from"]["source"] for part in [*record["earlier"], record] if "resumed_from" in part]


def soak(home: Path, runs: int, seed: int, steps: int, *, memory: bool = False) -> list[str]:
    """Disturb a training ``runs`` times, and return what happened; raise SystemExit where something is wrong."""
    dice = random.Random(seed)
    text = home / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    told = []
    for i in range(runs):
        victims = (NODE, *VICTIMS) if memory else VICTIMS
        victim, moment = victims[i % len(victims)], MOMENTS[(i // len(victims) + i) % len(MOMENTS)]
        told.append(disturb(command(home / "run", text, steps, memory=memory), home / "run", victim, moment, dice))
        print(f"{i + 1}/{runs}: {told[-1]}", flush=True)
    for folder in (home / "run", home / "whole"):
        words = command(folder, text, steps, memory=memory)
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{folder.name} did not finish:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    if figures(home / "run") != figures(home / "whole"):
        raise SystemExit(f"the losses in {home / 'run'} are not those in {home / 'whole'}")
    if len(figures(home / "run")) != steps:
        raise SystemExit(f"{home / 'run'} has not one line for each of its {steps} steps")
    if memory:
        found = sources(home / "run")
        print(f"resumed from memory {found.count('memory')} times, from disk {found.count('disk')} times")
        if left := list(home.glob("*.node*/*/*")):
            raise SystemExit(f"checkpoints are left in memory: {left}")
    return told


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="how often to kill")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--steps", type=int, default=0, help="of the training (0: enough for all runs)")
    parser.add_argument("--memory", action="store_true", help="with checkpoints in memory, and nodes that are lost")
    parser.add_argument("--home", type=Path, help="folder to work in (a temporary one)")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="soak-"))
    home.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    soak(home, args.runs, args.seed, args.steps or 20 + 12 * args.runs, memory=args.memory)
    print(f"{args.runs} runs, the losses are equal to the bit; {time.monotonic() - began:.0f} s in {home}")


if __name__ == "__main__":
    main()
