"""How close ``wordrun plan`` comes to measurements, over the backends on 1, 2 and 4 ranks of this machine.

    python benchmarks/plan.py DIR            # 250 million parameters
    python benchmarks/plan.py DIR --small    # 25 million: 3 GB, and 4 minutes on 2 cores
    python benchmarks/plan.py DIR --small --rounds 3
    python benchmarks/plan.py DIR --small --ranks 2 --backends deepspeed:stage=1,deepspeed:stage=3,diloco,3D:tp=1

Each round has a folder in DIR: start it again to continue. The ratios of all rounds are printed, and medians beyond 1.3
for time and 1.15 for memory. Use a machine without other work, and several rounds on a virtual one: the speeds from
which the plan follows are measured minutes before the points, and may have changed until then.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
from pathlib import Path

LIMITS = {"step_s": 1.3, "memory_gib": 1.15}
# One thread per rank, since ranks share cores; glibc keeps no memory that was freed.
LAUNCH = "--launch=--env OMP_NUM_THREADS=1 --env MALLOC_MMAP_THRESHOLD_=262144"
STUDY = ["--steps", "3", "--repeats", "3", LAUNCH]
MODEL = ["data=sample", "train.dtype=fp32", "train.device=cpu", "model.block_size=32", "model.batch_size=1"]
LARGE = ["model.n_layer=20", "model.n_embd=1024", "model.n_head=16"]
SMALL = ["model.n_layer=8", "model.n_embd=512", "model.n_head=8"]


def study(folder: Path, options: argparse.Namespace) -> list[dict[str, str]]:
    """Run one round, or what is left of it, and return the rows of its points."""
    words = [*STUDY, "--ranks", options.ranks, "--backends", options.backends, "--out", str(folder)]
    words += [*MODEL, *(SMALL if options.small else LARGE)]
    done = subprocess.run([sys.executable, "-m", "wordrun.study", "scaling", *words], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    with (folder / "points.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["state"] == "done"]


def main() -> int:
    """Run the study, and return 1 if an estimate is missing or beyond its limit, or a point has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--backends", default="DDP,FSDP,TP,PP")
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is measured, speeds included")
    options = parser.parse_args()
    ratios: dict[str, dict[str, list[float]]] = {}
    beyond = []
    for number in range(options.rounds):
        for row in study(options.dir / f"{number + 1}", options):
            for name in LIMITS:
                if row[f"planned_{name}"]:
                    found = ratios.setdefault(row["point"], {}).setdefault(name, [])
                    found.append(float(row[name]) / float(row[f"planned_{name}"]))
                else:
                    beyond.append(f"{row['point']}: no estimate of {name}")
    print("\n| point | time: measured / planned | median | memory: measured / planned | median |")
    print("| --- | --- | ---: | --- | ---: |")
    for point, by_name in ratios.items():
        cells = []
        for name, found in by_name.items():
            middle = statistics.median(found)
            cells += [", ".join(f"{ratio:.2f}" for ratio in found), f"{middle:.2f}"]
            if not 1 / LIMITS[name] <= middle <= LIMITS[name]:
                beyond.append(f"{point}: {name} is {middle:.2f} times the estimate")
        print(f"| {point} | {' | '.join(cells)} |")
    print("", *(beyond or ["all medians are within 1.3 (time) and 1.15 (memory)"]), sep="\n")
    return int(bool(beyond))


if __name__ == "__main__":
    raise SystemExit(main())
