"""Kill a training over and over, let it go on each time, and see that it ends as if nothing had happened.

    python tests/soak.py --runs 30 --seed 0
    python tests/soak.py --runs 30 --seed 0 --memory
    python tests/soak.py --runs 1000 --seed 0 --elastic

Each run kills one rank, all ranks or ``launch`` itself by SIGKILL, at a random moment of start, training or saving, and
starts the same command again with ``train.resume=auto``. After the last one the training is left to finish, and its
losses are compared with those of a training that nobody disturbed: to the bit.

With ``--memory``, the two ranks are on two simulated nodes and keep checkpoints in memory; now and then a node is lost
with its memory.

With ``--elastic``, guardians start the ranks, 4 on two simulated nodes, and the launch goes on unless it is killed
itself. Faults are then also guardians and all ranks of a node that are killed, ranks that are stopped, memory that is
full, both nodes lost together, and a guardian that is killed during a restart. With ``--fewer`` as well, a run that has
lost a node continues with half of its ranks until the node is back, and the losses are equal to 1e-5.
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
import tempfile
import time
from pathlib import Path
from typing import Any

from soak_runs import (
    command,
    compare,
    environment,
    finish,
    last_step,
    living,
    node_of,
    parent,
    saving,
    sources,
    wait_for,
    wait_until_gone,
)  # fmt: skip

A_MOMENT = 0.001  # a save of these small models takes milliseconds
VICTIMS = ("a rank", "all ranks", "launch")
NODE = "a node"
MOMENTS = ("training", "saving", "starting")
ELASTIC_VICTIMS = (
    "a rank", "a node's ranks", "a guardian", "a rank without memory", "a rank and in the restart a guardian",
    "launch", NODE, "a stopped rank", "a rank", "all nodes",
)  # fmt: skip


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


def disturb(words: list[str], folder: Path, victim: str, moment: str, dice: random.Random) -> str:
    """Start the command and kill ``victim`` at ``moment``; return what happened."""
    before = last_step(folder)
    with open(folder.with_suffix(".out"), "a") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    if moment == "starting":
        time.sleep(dice.uniform(0.1, 1))
    elif moment == "saving":
        target = before + dice.randint(1, 6)
        wait_for(lambda: last_step(folder) >= target, process)
        wait_for(lambda: saving(folder), process, pause=A_MOMENT)
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
    wait_until_gone(ranks, 20, victim)
    if victim == NODE:
        shutil.rmtree(f"{folder.with_suffix('.node')}0", ignore_errors=True)
    where = " in a save" if in_save else ""
    return f"killed {victim} ({len(pids)}) while {moment}, after step {step}{where}: status {status}"


class Elastic:
    """A training under guardians, in which one fault follows another."""

    lost = 0
    """How many times the run has ended, though it should have survived."""

    def __init__(self, words: list[str], folder: Path, dice: random.Random) -> None:
        self.words, self.folder, self.dice = words, folder, dice
        self.process: subprocess.Popen[Any] | None = None
        self.before: list[int] = []
        """The ranks that the last fault has ended."""
        self.struck: dict[int, set[str]] = {}
        """Whom a fault has hit, by the last step: launch gives up when it is the same twice."""

    def start(self) -> subprocess.Popen[Any]:
        """Start the command if it does not run, or has failed."""
        if self.process is not None and self.process.poll():
            self.lost, self.process = self.lost + 1, None
        if self.process is None:
            with open(self.folder.with_suffix(".out"), "a") as out:
                self.process = subprocess.Popen(self.words, stdout=out, stderr=out)
        return self.process

    def strike(self, victim: str, moment: str) -> str:
        """Wait for the moment in a generation that no fault has hit, kill the victim, and return what happened."""
        process, folder = self.start(), self.folder
        wait_for(lambda: (pids := living(folder)) and not {*pids} & {*self.before}, process)
        target = last_step(folder) + self.dice.randint(1, 6)
        if moment != "starting" or "memory" in victim:  # without any, a run does not begin
            wait_for(lambda: last_step(folder) >= target, process)
        if moment == "saving":
            wait_for(lambda: saving(folder), process, pause=A_MOMENT)
        step, ranks = last_step(folder), living(folder)
        if not ranks:
            return f"nobody to kill after step {step}: {'ended' if process.poll() is not None else 'restarting'}"
        of_guardian: dict[int, list[int]] = {}
        for pid in ranks:
            of_guardian.setdefault(parent(pid), []).append(pid)
        guardian = self.dice.choice(sorted(of_guardian))
        node, of_node = node_of(guardian), of_guardian[guardian]
        rank = self.dice.randrange(len(ranks))
        struck = self.struck.setdefault(step, set())
        names = {f"{rank}"} if " rank" in victim else {*map(str, range(len(ranks)))} if "ranks" in victim else set()
        names |= {"guardian"} if "guardian" in victim or ("node" in victim and "ranks" not in victim) else set()
        if struck & names:
            return f"left {victim} alone after step {step}, whom a fault has hit there"
        struck |= names
        pids = {
            "a node's ranks": of_node, "a guardian": [guardian], "launch": [process.pid], NODE: [guardian, *of_node],
            "all nodes": [*of_guardian, *ranks],
        }.get(victim, [ranks[rank]])  # fmt: skip
        full = folder.with_suffix(".node.full")
        if "memory" in victim:
            full.touch()
            wait_for(lambda: last_step(folder) >= step + 3, process)
            full.unlink()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if "stopped" in victim else signal.SIGKILL)
        if "restart" in victim:
            time.sleep(self.dice.uniform(0, 1.5))
            with contextlib.suppress(ProcessLookupError):
                os.kill(guardian, signal.SIGKILL)
        self.before = ranks
        if victim == "launch":
            process.wait(timeout=30)
            self.process = None
        wait_until_gone(ranks, 60, victim)
        for each in {NODE: [node], "all nodes": [0, 1]}.get(victim, []):
            shutil.rmtree(f"{folder.with_suffix('.node')}{each}", ignore_errors=True)
        return f"hit {victim} ({len(pids)}) while {moment}, after step {step}"


def soak_elastic(home: Path, faults: int, seed: int, steps: int, ranks: int = 4, *, fewer: bool = False) -> list[str]:
    """Hit a training under guardians ``faults`` times; return what happened, or raise SystemExit if it is wrong."""
    dice = random.Random(seed)
    text = home / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    run = Elastic(command(home / "run", text, steps, elastic=ranks, fewer=fewer), home / "run", dice)
    told: list[str] = []
    while len(told) < faults:
        i = len(told)
        told.append(run.strike(ELASTIC_VICTIMS[i % len(ELASTIC_VICTIMS)], dice.choice(MOMENTS)))
        print(f"{i + 1}/{faults}: {told[-1]}", flush=True)
    if run.start().wait(timeout=300):
        raise SystemExit(f"the run did not survive: {home / 'run.out'}")
    finish(home / "whole", command(home / "whole", text, steps, elastic=ranks, fewer=fewer))
    compare(home, steps, error=1e-5 if fewer else 0.0)
    found = json.loads((home / "run" / "run.json").read_text())["recoveries"]
    seconds = sorted(fault["seconds"] for fault in found if fault["seconds"] is not None)
    lost = max(fault["last_step"] - fault["resumed_step"] for fault in found if fault["last_step"] is not None)
    from_memory = sum(fault["source"] == "memory" for fault in found)
    median, late = seconds[len(seconds) // 2], seconds[int(0.95 * len(seconds))]
    print(
        f"{len(found)} recoveries, {from_memory} from memory, at most {lost} steps lost; from the fault to the next "
        f"step {median:.1f} s (median), {late:.1f} s (95th percentile); {run.lost} faults not survived"
    )
    if run.lost:
        raise SystemExit(f"the run has ended {run.lost} times: {home / 'run.out'}")
    return told


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
        finish(folder, command(folder, text, steps, memory=memory))
    compare(home, steps)
    if memory:
        found = sources(home / "run")
        print(f"resumed from memory {found.count('memory')} times, from disk {found.count('disk')} times")
    return told


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="how often to kill")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--steps", type=int, default=0, help="of the training (0: enough for all runs)")
    parser.add_argument("--memory", action="store_true", help="with checkpoints in memory, and nodes that are lost")
    parser.add_argument("--elastic", action="store_true", help="under guardians, on two simulated nodes")
    parser.add_argument("--fewer", action="store_true", help="with --elastic: continue without a lost node")
    parser.add_argument("--ranks", type=int, default=4, help="with --elastic")
    parser.add_argument("--home", type=Path, help="folder to work in (a temporary one)")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="soak-"))
    home.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    steps = args.steps or 20 + (6 if args.elastic else 12) * args.runs
    if args.elastic:
        soak_elastic(home, args.runs, args.seed, steps, args.ranks, fewer=args.fewer)
    else:
        soak(home, args.runs, args.seed, steps, memory=args.memory)
    equal = "to 1e-5" if args.fewer else "to the bit"
    print(f"{args.runs} runs, the losses are equal {equal}; {time.monotonic() - began:.0f} s in {home}")


if __name__ == "__main__":
    main()
