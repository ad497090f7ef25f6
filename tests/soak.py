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
itself. Ranks, all ranks of a node, guardians and whole nodes are then hit in the midst of a step, an evaluation, a
save, their start and a restart; ranks are also stopped, guardians killed while they import, and memory is full, also
during a restart. ``--json FILE`` collects what several such runs have cost.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak_runs import (
    children,
    command,
    compare,
    environment,
    evaluating,
    finish,
    guardians_below,
    last_step,
    living,
    node_of,
    options,
    parent,
    ranks_below,
    recovered,
    saving,
    send,
    sources,
    wait_for,
    wait_until_gone,
)

A_MOMENT = 0.001  # a save of these small models takes milliseconds
AWAITED = {"save": saving, "evaluation": evaluating}
"""Moments that have to be waited for."""
VICTIMS = ("a rank", "all ranks", "launch")
NODE = "a node"
MOMENTS = ("training", "saving", "starting")
ELASTIC_VICTIMS = (
    "a rank",
    "a guardian",
    "a rank without memory",
    "a rank and in the restart a guardian",
    "a node's ranks",
    "launch",
    "an importing guardian",
    NODE,
    "a stopped rank",
    "a rank whose restart has no memory",
    "a rank",
    "all nodes",
)
ELASTIC_MOMENTS = ("step", "evaluation", "save", "start")
# launch gives up when the same rank is killed twice at a step: the steps of two faults of one must be so far apart,
# since some are taken between the soak's look and launch's.
APART = 3


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
        "a rank": dice.sample(ranks, min(1, len(ranks))),
        "all ranks": ranks,
        "launch": [process.pid],
        NODE: [pid for pid in ranks if variable in environment(pid)],
    }[victim]
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
        self.dead: list[int] = []
        """The ranks that the last fault has ended."""
        self.struck: dict[int, set[str]] = {}
        """Whom a fault has hit, by the last step."""

    def start(self) -> subprocess.Popen[Any]:
        """Start the command if it does not run, or has failed."""
        if self.process is not None and self.process.poll():
            print(f"the run has ended with status {self.process.poll()}", flush=True)
            self.lost, self.process = self.lost + 1, None
        if self.process is None:
            with open(self.folder.with_suffix(".out"), "a") as out:
                self.process = subprocess.Popen(self.words, stdout=out, stderr=out)
        return self.process

    def strike(self, victim: str, moment: str) -> str:
        """Wait for the moment in ranks that no fault has hit, hit the victim, and return what happened; empty: not."""
        process, folder = self.start(), self.folder
        if "importing" in victim:
            return self.strike_importing()
        self.wait(lambda: (pids := living(folder)) and not {*pids} & {*self.dead})
        target = last_step(folder) + self.dice.randint(1, 6)
        if moment != "start" or "memory" in victim:  # without any, a run does not begin
            self.wait(lambda: last_step(folder) >= target)
            if moment in AWAITED:
                self.wait(lambda: AWAITED[moment](folder), A_MOMENT)
        step, ranks = last_step(folder), living(folder)
        if not ranks:
            return ""
        of_guardian: dict[int, list[int]] = {}
        for pid in ranks:
            of_guardian.setdefault(parent(pid), []).append(pid)
        guardian = self.dice.choice(sorted(of_guardian))
        node, of_node = node_of(guardian), of_guardian[guardian]
        if node is None or 0 in of_guardian:  # ended meanwhile
            return ""
        one = [self.dice.choice(ranks)]
        pids = {
            "a node's ranks": of_node,
            "a guardian": [guardian],
            "launch": [process.pid],
            NODE: [guardian, *of_node],
            "all nodes": [*of_guardian, *ranks],
        }.get(victim, one)
        if self.too_near(step, [f"rank {ranks.index(pid)}" if pid in ranks else "guardian" for pid in pids]):
            return ""
        full = folder.with_suffix(".node.full")
        if "memory" in victim:
            full.touch()
            self.wait(lambda: last_step(folder) >= step + 3)
        since = time.time()
        if "without memory" in victim:
            full.unlink()
        send(pids, signal.SIGSTOP if "stopped" in victim else signal.SIGKILL)
        if "in the restart" in victim:
            time.sleep(self.dice.uniform(0, 1.5))
            send([guardian], signal.SIGKILL)
        self.dead = ranks if victim == "launch" else [*pids, *of_node] if "guardian" in victim else pids
        if victim == "launch":
            process.wait(timeout=30)
            self.process = None
        wait_until_gone([pid for pid in self.dead if pid in ranks], 60, victim)
        if full.exists():
            self.wait(lambda: recovered(folder, since))
            reached = last_step(folder)
            self.wait(lambda: last_step(folder) >= reached + 3)
            full.unlink()
        for each in {NODE: [node], "all nodes": [0, 1]}.get(victim, []):
            shutil.rmtree(f"{folder.with_suffix('.node')}{each}", ignore_errors=True)
        when = "" if moment == "step" else f" in {'an' if moment[0] == 'e' else 'a'} {moment}"
        return f"hit {victim} ({len(pids)}){when}, after step {step}"

    def wait(self, condition: Callable[[], Any], pause: float = 0.01) -> None:
        """Wait until ``condition()``, or the run has ended; raise SystemExit if neither comes."""
        assert self.process is not None
        if not wait_for(condition, self.process, pause=pause) and self.process.poll() is None:
            raise SystemExit(f"the run makes no progress after step {last_step(self.folder)}: {self.folder}.out")

    def strike_importing(self) -> str:
        """Kill a guardian of a launch that has just begun, before it has ranks."""
        process = self.start()
        self.wait(lambda: guardians_below(process.pid))
        time.sleep(self.dice.uniform(0, 1))
        found = [pid for pid in guardians_below(process.pid) if not children(pid)]
        if not found:
            return self.strike("a guardian", "start")
        send(found[:1], signal.SIGKILL)
        return "hit an importing guardian"

    def too_near(self, step: int, names: list[str]) -> bool:
        """Return whether a fault has hit one of the same at nearly the same step; if not, remember this one."""
        if any(self.struck.get(each, set()) & {*names} for each in range(step - APART, step + APART + 1)):
            return True
        self.struck.setdefault(step, set()).update(names)
        return False


def soak_elastic(
    home: Path,
    faults: int,
    seed: int,
    steps: int,
    ranks: int = 4,
    *,
    file: Path | None = None,
    whole: Callable[[list[str]], None] | None = None,
) -> list[str]:
    """Hit a training under guardians ``faults`` times; return what happened, or raise SystemExit if it is wrong.

    ``whole`` trains with the options that it gets and without faults; None: it is launched.
    """
    dice = random.Random(seed)
    text = home / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    run = Elastic(command(home / "run", text, steps, elastic=ranks), home / "run", dice)
    told: list[str] = []
    try:
        hit(run, faults, told)
    except BaseException:
        if run.process is not None:
            run.process.kill()
        raise
    undisturbed(home, command(home / "whole", text, steps, elastic=ranks), whole)
    compare(home, steps)
    found = json.loads((home / "run" / "run.json").read_text())["recoveries"]
    report(found, faults, run.lost, file)
    if run.lost:
        raise SystemExit(f"the run has ended {run.lost} times: {home / 'run.out'}")
    return told


def hit(run: Elastic, faults: int, told: list[str]) -> None:
    """Hit a run ``faults`` times, and let it finish; add what happened to ``told``."""
    while len(told) < faults:
        if what := run.strike(ELASTIC_VICTIMS[len(told) % len(ELASTIC_VICTIMS)], run.dice.choice(ELASTIC_MOMENTS)):
            told.append(what)
            print(f"{len(told)}/{faults}: {what}", flush=True)
        elif run.process is not None and run.process.poll() == 0:
            raise SystemExit(f"the run has finished after {len(told)} faults: give it more --steps")
    if run.start().wait(timeout=300):
        raise SystemExit(f"the run did not survive: {run.folder}.out")


def report(recoveries: list[dict[str, Any]], faults: int, lost: int, file: Path | None) -> None:
    """Print what faults have cost, with those of the earlier runs that ``file`` has."""
    earlier = json.loads(file.read_text()) if file and file.exists() else {}
    total = {
        "runs": earlier.get("runs", 0) + 1,
        "faults": earlier.get("faults", 0) + faults,
        "lost": earlier.get("lost", 0) + lost,
        "recoveries": [*earlier.get("recoveries", []), *recoveries],
    }
    if file:
        file.write_text(json.dumps(total))
    print(f"{total['faults']} faults in {total['runs']} runs, {total['lost']} of them not survived")
    guarded = [each for each in total["recoveries"] if each["cause"] != "lost guardian"]
    for name, some in (("ranks", guarded), ("guardians", [x for x in total["recoveries"] if x not in guarded])):
        seconds = sorted(each["seconds"] for each in some if each["seconds"] is not None)
        steps = sorted(each["last_step"] - each["resumed_step"] for each in some if each["last_step"] is not None)
        if seconds and steps:
            from_memory = sum(each["source"] == "memory" for each in some)
            print(f"{len(some)} recoveries of {name}, {from_memory} from memory; median, 95th percentile and most:")
            for unit, each in (("s from the fault to the next step", seconds), ("steps lost", steps)):
                print(f"  {each[len(each) // 2]:.4g}, {each[int(0.95 * len(each))]:.4g}, {each[-1]:.4g} {unit}")


def undisturbed(home: Path, words: list[str], whole: Callable[[list[str]], None] | None) -> None:
    """Train without faults, by the command or by ``whole``."""
    if whole is None:
        finish(home / "whole", words)
    else:
        whole(options(words))


def soak(
    home: Path,
    runs: int,
    seed: int,
    steps: int,
    *,
    memory: bool = False,
    whole: Callable[[list[str]], None] | None = None,
) -> list[str]:
    """Disturb a training ``runs`` times, and return what happened; raise SystemExit where something is wrong.

    ``whole`` is that of ``soak_elastic``.
    """
    dice = random.Random(seed)
    text = home / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    told = []
    for i in range(runs):
        victims = (NODE, *VICTIMS) if memory else VICTIMS
        victim, moment = victims[i % len(victims)], MOMENTS[(i // len(victims) + i) % len(MOMENTS)]
        told.append(disturb(command(home / "run", text, steps, memory=memory), home / "run", victim, moment, dice))
        print(f"{i + 1}/{runs}: {told[-1]}", flush=True)
    finish(home / "run", command(home / "run", text, steps, memory=memory))
    undisturbed(home, command(home / "whole", text, steps, memory=memory), whole)
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
    parser.add_argument("--ranks", type=int, default=4, help="with --elastic")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="with --elastic: add what the faults have cost to FILE"
    )
    parser.add_argument("--home", type=Path, help="folder to work in (a temporary one)")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="soak-"))
    home.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and launch with it
    began = time.monotonic()
    steps = args.steps or 20 + (8 if args.elastic else 12) * args.runs
    if args.elastic:
        soak_elastic(home, args.runs, args.seed, steps, args.ranks, file=args.json)
    else:
        soak(home, args.runs, args.seed, steps, memory=args.memory)
    print(f"{args.runs} runs, the losses are equal to the bit; {time.monotonic() - began:.0f} s in {home}")


if __name__ == "__main__":
    main()
