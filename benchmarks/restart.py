"""Seconds from a fault to the next step: with guardians (``launch --elastic``), and relaunching everything.

    python benchmarks/restart.py                          # 4 ranks, 5 faults each way, minutes
    python benchmarks/restart.py -n 2 --faults 1          # to see that it works

While model=nano trains, a rank is killed by SIGKILL repeatedly, a different one each time. Checkpoints are in memory,
at every step. All strategies must end with the losses of a run without faults, bit for bit. They use FSDP, because on
more than two ranks torch's DDP sums gradients in a different order after its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = {"ranks are forked": ["--elastic"], "launched again": []}
BETWEEN = 12
"""Steps between two faults."""


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def process_of(rank: int, launch: int) -> int | None:
    """Return the process ID of a rank: of the Python processes below ``launch``, the one with its number."""
    todo = [launch]
    while todo:
        pid = todo.pop()
        try:
            todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            is_python = Path(f"/proc/{pid}/comm").read_text().startswith("python")
            if is_python and f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        except OSError:
            continue  # it has ended
    return None


def train(way: str, faults: int, ranks: int, folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """Train, kill ``faults`` times, and return the run's recoveries."""
    words = [
        sys.executable,
        "-m",
        "wordrun.launch",
        *WAYS[way],
        *(["--retries", str(faults)] if faults else []),
        "-n",
        str(ranks),
        sys.executable,
        *shlex.split("""
        -m wordrun data=sample model=nano tracker=jsonl
        train.backend=FSDP train.memory_checkpoint_interval=1 train.log_interval=1
    """),
        f"train.max_iters={BETWEEN * (faults + 1)}",
        *shlex.split("train.eval_interval=0 train.sample_tokens=0 train.device=cpu train.dtype=fp32"),
        f"hydra.run.dir={folder}",
        *overrides,
    ]
    with open(folder.with_suffix(".out"), "w") as out:
        launch = subprocess.Popen(words, stdout=out, stderr=out)
    for fault in range(faults):
        target, victim = BETWEEN * (fault + 1), fault % ranks
        while not (done := steps(folder)) or done[-1]["step"] < target:
            if launch.poll() is not None:
                raise SystemExit(f"the run ended early: {folder.with_suffix('.out')}")
            time.sleep(0.005)
        pids = json.loads((folder / "launch.json").read_text()).get("pids")
        if pid := pids[victim] if pids else process_of(victim, launch.pid):
            os.kill(pid, signal.SIGKILL)
        while len(json.loads((folder / "run.json").read_text()).get("recoveries", [])) <= fault:
            if launch.poll() is not None:
                raise SystemExit(f"the run did not survive: {folder.with_suffix('.out')}")
            time.sleep(0.05)
    if launch.wait(timeout=600):
        raise SystemExit(f"the run failed: {folder.with_suffix('.out')}")
    found: list[dict[str, Any]] = json.loads((folder / "run.json").read_text()).get("recoveries", [])
    return found


def main() -> None:
    """Print a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=4, help="ranks")
    parser.add_argument("--faults", type=int, default=5, help="how often a rank is killed, under each strategy")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="what to measure")
    parser.add_argument("overrides", nargs="*", help="options of the run")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    home = Path(tempfile.mkdtemp(prefix="restart-"))
    # As many steps as the others take.
    length = f"train.max_iters={BETWEEN * (args.faults + 1)}"
    train("ranks are forked", 0, args.n, home / "whole", [length, *args.overrides])
    losses = [line["loss"] for line in steps(home / "whole")]
    medians = {}
    for way in args.ways:
        folder = home / way.replace(" ", "-")
        found = train(way, args.faults, args.n, folder, args.overrides)
        if [line["loss"] for line in steps(folder)] != losses:
            raise SystemExit(f"{way}: the losses differ from those without faults, in {folder}")
        seconds = sorted(fault["seconds"] for fault in found)
        medians[way] = statistics.median(seconds)
        lost = max(fault["last_step"] - fault["resumed_step"] for fault in found)
        late = seconds[max(0, round(0.95 * len(seconds)) - 1)]
        print(f"{way:<16} {medians[way]:6.2f} s (median), {late:6.2f} s (95th percentile), at most {lost} steps lost")
    for way, seconds in medians.items():
        print(f"{way}: {seconds / medians[args.ways[-1]]:.2f} of the time of '{args.ways[-1]}'")
    print(f"the losses are bitwise equal; {home}")


if __name__ == "__main__":
    main()
