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
itself. Victims are also guardians and all ranks of a node.
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
ELASTIC_VICTIMS = ("a rank", "a node's ranks", "a guardian", "a rank", "launch", NODE)
PATIENCE_S = 90
# A rank that has the memory of its node.
RANK = """
import os, sys
os.environ["WORDRUN_SHM"] = f"{sys.argv.pop(1)}{os.environ['NODE_RANK']}"
os.makedirs(os.environ["WORDRUN_SHM"], exist_ok=True)
from wordrun.cli import main
sys.exit(main())
"""


def command(folder: Path, text: Path, steps: int, *, memory: bool = False, elastic: int = 0) -> list[str]:
    """Return the command that trains, or goes on; ``elastic`` is the number of ranks under guardians."""
    python = [sys.executable]
    if elastic:
        words = command(folder, text, steps, memory=True)
        hosts, script = folder.with_suffix(".hosts"), folder.with_suffix(".py")
        hosts.write_text(f"{os.uname().nodename}\nlocalhost\n")
        script.write_text(RANK)
        return [
            *words[:2], str(elastic), "--elastic", "--retries", "100000", "--hostfile", str(hosts), "--launcher-args",
            "-launcher fork", "--oversubscribe", sys.executable, str(script), f"{folder.with_suffix('.node')}",
            *words[words.index("wordrun") + 1 :],
        ]  # fmt: skip
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


def wait_until_gone(ranks: list[int], seconds: float, victim: str) -> None:
    """Wait until all ``ranks`` have ended; raise SystemExit if any is left after ``seconds``."""
    end = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        if time.monotonic() > end:
            raise SystemExit(f"ranks are left {seconds:g} s after {victim} had been killed")
        time.sleep(0.01)


def disturb(words: list[str], folder: Path, victim: str, moment: str, dice: random.Random) -> str:
    """Start the command and kill ``victim`` at ``moment``; return what happened."""
    before = last_step(folder)
    with open(folder.with_suffix(".out"), "a") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    if moment == "starting":
        time.sleep(dice.uniform(0.1, 1))
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
    wait_until_gone(ranks, 20, victim)
    if victim == NODE:
        shutil.rmtree(f"{folder.with_suffix('.node')}0", ignore_errors=True)
    where = " in a save" if in_save else ""
    return f"killed {victim} ({len(pids)}) while {moment}, after step {step}{where}: status {status}"


def living(folder: Path) -> list[int]:
    """Return the process IDs of a run's ranks, in order; none if one of them has ended."""
    try:
        pids: list[int] = json.loads((folder / "launch.json").read_text()).get("pids", [])
    except (OSError, ValueError):  # it is being moved
        return []
    return pids if all(os.path.exists(f"/proc/{pid}") for pid in pids) else []


def parent(pid: int) -> int:
    """Return the process ID of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Elastic:
    """A training under guardians, in which one fault follows another."""

    def __init__(self, words: list[str], folder: Path, dice: random.Random) -> None:
        self.words, self.folder, self.dice = words, folder, dice
        self.process: subprocess.Popen[Any] | None = None
        self.before: list[int] = []
        """The ranks that the last fault has ended."""
        self.struck: dict[int, set[str]] = {}
        """Whom a fault has hit, by the last step: launch gives up when it is the same twice."""

    def start(self) -> subprocess.Popen[Any]:
        """Start the command if it does not run."""
        if self.process is None:
            with open(self.folder.with_suffix(".out"), "a") as out:
                self.process = subprocess.Popen(self.words, stdout=out, stderr=out)
        return self.process

    def strike(self, victim: str, moment: str) -> str:
        """Wait for the moment in a generation that no fault has hit, kill the victim, and return what happened."""
        process, folder = self.start(), self.folder
        wait_for(lambda: (pids := living(folder)) and not {*pids} & {*self.before}, process)
        target = last_step(folder) + self.dice.randint(1, 6)
        if moment != "starting":
            wait_for(lambda: last_step(folder) >= target and (moment == "training" or saving(folder)), process)
        step, ranks = last_step(folder), living(folder)
        if not ranks:
            return f"nobody to kill after step {step}: {'ended' if process.poll() is not None else 'restarting'}"
        half = len(ranks) // 2
        node = self.dice.choice((0, 1))
        of_node = ranks[:half] if node == 0 else ranks[half:]
        rank = self.dice.randrange(len(ranks))
        struck = self.struck.setdefault(step, set())
        name = {"a rank": f"{rank}", "a node's ranks": f"{ranks.index(of_node[0])}"}.get(victim, "guardian")
        if victim != "launch" and name in struck:
            return f"left {victim} alone after step {step}, whom a fault has hit there"
        struck |= (
            {name} if victim == "a rank" else {*map(str, range(len(ranks)))} if victim == "a node's ranks" else {name}
        )
        guardian = [parent(of_node[0])]
        pids = {"a rank": [ranks[rank]], "a node's ranks": of_node, "a guardian": guardian, "launch": [process.pid],
                NODE: [*guardian, *of_node]}[victim]  # fmt: skip
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.before = ranks
        if victim == "launch":
            process.wait(timeout=30)
            self.process = None
        wait_until_gone(ranks, 60, victim)
        if victim == NODE:
            shutil.rmtree(f"{folder.with_suffix('.node')}{node}", ignore_errors=True)
        return f"killed {victim} ({len(pids)}) while {moment}, after step {step}"


def soak_elastic(home: Path, faults: int, seed: int, steps: int, ranks: int = 4) -> list[str]:
    """Hit a training under guardians ``faults`` times; return what happened, or raise SystemExit if it is wrong."""
    dice = random.Random(seed)
    text = home / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 200)
    run = Elastic(command(home / "run", text, steps, elastic=ranks), home / "run", dice)
    told: list[str] = []
    while len(told) < faults:
        i = len(told)
        told.append(run.strike(ELASTIC_VICTIMS[i % len(ELASTIC_VICTIMS)], dice.choice(MOMENTS)))
        print(f"{i + 1}/{faults}: {told[-1]}", flush=True)
    if run.start().wait(timeout=300):
        raise SystemExit(f"the run did not survive: {home / 'run.out'}")
    finish(home / "whole", command(home / "whole", text, steps, elastic=ranks))
    compare(home, steps)
    found = json.loads((home / "run" / "run.json").read_text())["recoveries"]
    seconds = sorted(fault["seconds"] for fault in found if fault["seconds"] is not None)
    lost = max(fault["last_step"] - fault["resumed_step"] for fault in found if fault["last_step"] is not None)
    from_memory = sum(fault["source"] == "memory" for fault in found)
    print(
        f"{len(found)} recoveries, {from_memory} from memory, at most {lost} steps lost; from the fault to the next "
        f"step {seconds[len(seconds) // 2]:.1f} s (median), {seconds[int(0.95 * len(seconds))]:.1f} s (95th percentile)"
    )
    return told


def finish(folder: Path, words: list[str]) -> None:
    """Let a training run to its end."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{folder.name} did not finish:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def compare(home: Path, steps: int) -> None:
    """Compare the losses of the training that was disturbed with those of the other, to the bit."""
    if figures(home / "run") != figures(home / "whole"):
        raise SystemExit(f"the losses in {home / 'run'} are not those in {home / 'whole'}")
    if len(figures(home / "run")) != steps:
        raise SystemExit(f"{home / 'run'} has not one line for each of its {steps} steps")
    if left := list(home.glob("*.node*/*/*")):
        raise SystemExit(f"checkpoints are left in memory: {left}")


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
    parser.add_argument("--ranks", type=int, default=4, help="with --elastic")
    parser.add_argument("--home", type=Path, help="folder to work in (a temporary one)")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="soak-"))
    home.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    steps = args.steps or 20 + (6 if args.elastic else 12) * args.runs
    if args.elastic:
        soak_elastic(home, args.runs, args.seed, steps, args.ranks)
    else:
        soak(home, args.runs, args.seed, steps, memory=args.memory)
    print(f"{args.runs} runs, the losses are equal to the bit; {time.monotonic() - began:.0f} s in {home}")


if __name__ == "__main__":
    main()
