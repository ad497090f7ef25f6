"""Seconds from the command to the first step, and from the last step to the prompt, beside ``import torch``.

    python benchmarks/startup.py                  # one and two ranks, tracker=jsonl
    python benchmarks/startup.py tracker=wandb    # further overrides apply to every run

The programs alternate, so that other load slows all of them; the table has medians. CPU time is that of all the
processes, in user mode, and depends less on other load than wall time does.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

GOALS = {1: 2.0, 2: 2.6}
"""Most times ``import torch`` to the first step, by number of ranks."""
END_S = 1.5
"""Most seconds from the last step to the prompt."""


@dataclass(frozen=True)
class Times:
    """Wall seconds and CPU seconds of one run."""

    first: float
    """From the command to the first step; of ``import torch``, to its end."""
    first_cpu: float
    end: float = 0.0
    """From the last step to the exit."""
    end_cpu: float = 0.0


def cpu_seconds(root: int) -> float:
    """Return the user CPU time of the process ``root`` and of its descendants."""
    children, used = defaultdict(list), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children[int(fields[1])].append(int(path.parent.name))
        used[int(path.parent.name)] = int(fields[11]) + int(fields[13])
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0)
        todo += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


def import_torch() -> Times:
    """Measure ``python -c 'import torch'``."""
    start, before = time.perf_counter(), os.times().children_user
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return Times(time.perf_counter() - start, os.times().children_user - before)


def train(ranks: int, steps: int, overrides: list[str], folder: Path) -> Times:
    """Measure a run of ``steps`` steps on ``ranks`` ranks; one rank is started without ``launch``."""
    program = [
        sys.executable,
        *shlex.split("-m wordrun data=sample tracker=jsonl train.log_interval=1"),
        f"train.max_iters={steps}",
        f"hydra.run.dir={folder}/run",
        *overrides,
    ]
    launch = [sys.executable, "-m", "wordrun.launch", "-n", str(ranks)] if ranks > 1 else []
    first = last = first_cpu = last_cpu = 0.0
    before = os.times().children_user
    start = time.perf_counter()
    process = subprocess.Popen([*launch, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if not (found := re.search(rf"step (\d+)/{steps}\b", line)):
            continue
        now, cpu = time.perf_counter(), cpu_seconds(process.pid)
        if not first:
            first, first_cpu = now, cpu
        if int(found[1]) == steps:
            last, last_cpu = now, cpu
    if process.wait() or not last:
        raise SystemExit("".join(lines))
    total_cpu = os.times().children_user - before
    return Times(first - start, first_cpu, time.perf_counter() - last, total_cpu - last_cpu)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of every run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program (default 5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default 20)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(1, 2, args.overrides, Path(folder) / "warm")  # prepares the data and fills the page cache
        found: dict[int, list[Times]] = defaultdict(list)
        for number in range(args.rounds):
            found[0].append(import_torch())
            for ranks in args.ranks:
                found[ranks].append(train(ranks, args.steps, args.overrides, Path(folder) / f"{number}-{ranks}"))
                print(f"round {number + 1}, {ranks} ranks: {found[ranks][-1]}", flush=True)

    def median(ranks: int, name: str) -> float:
        return float(statistics.median(getattr(times, name) for times in found[ranks]))

    print("\n| | wall [s] | times import torch | goal | CPU [s] | times import torch |\n|---|---|---|---|---|---|")
    base, base_cpu = median(0, "first"), median(0, "first_cpu")
    print(f"| python -c 'import torch' | {base:.2f} | | | {base_cpu:.2f} | |")
    for ranks in args.ranks:
        wall, cpu = median(ranks, "first"), median(ranks, "first_cpu")
        goal = f"{GOALS[ranks]}" if ranks in GOALS else ""
        row = (f"first step, {ranks} ranks", f"{wall:.2f}", f"{wall / base:.2f}", goal, f"{cpu:.2f}")
        print(f"| {' | '.join(row)} | {cpu / base_cpu:.2f} |")
    for ranks in args.ranks:
        end, cpu = median(ranks, "end"), median(ranks, "end_cpu")
        print(f"| last step to prompt, {ranks} ranks | {end:.2f} | | {END_S} s | {cpu:.2f} | |")


if __name__ == "__main__":
    main()
