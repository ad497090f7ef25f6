"""How close ``wordrun plan`` comes to measurements, over the backends on 1, 2 and 4 ranks of this machine.

    python benchmarks/plan.py DIR            # 250 million parameters: 18 GB of memory, and 10 to 15 minutes on 2 cores
    python benchmarks/plan.py DIR --small    # 25 million: 2 GB, and 4 minutes
    python benchmarks/plan.py DIR --small --ranks 2 --backends deepspeed:stage=1,deepspeed:stage=3,diloco,3D:tp=1

DIR is the study's folder: start it again to continue. The table and the ratios beyond 1.3 for time and 1.15 for memory
are printed. Use a machine without other work: the speeds from which the plan follows are measured before the points.
"""

from __future__ import annotations

import argparse
import csv
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


def main() -> int:
    """Run the study, and return 1 if an estimate is missing or beyond its limit, or a point has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--backends", default="DDP,FSDP,TP,PP")
    options = parser.parse_args()
    words = [*STUDY, "--ranks", options.ranks, "--backends", options.backends, "--out", str(options.dir)]
    words += [*MODEL, *(SMALL if options.small else LARGE)]
    done = subprocess.run([sys.executable, "-m", "wordrun.study", "scaling", *words])
    if done.returncode:
        return done.returncode
    print((options.dir / "scaling.md").read_text().partition("## Planned")[2].partition("\n## ")[0])
    with (options.dir / "points.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] == "done"]
    beyond = []
    for row in rows:
        for name, limit in LIMITS.items():
            if not row[f"planned_{name}"]:
                beyond.append(f"{row['point']}: no estimate of {name}")
                continue
            ratio = float(row[name]) / float(row[f"planned_{name}"])
            if not 1 / limit <= ratio <= limit:
                beyond.append(f"{row['point']}: {name} is {ratio:.2f} times the estimate")
    print("\n".join(beyond or ["all ratios are within 1.3 (time) and 1.15 (memory)"]))
    return int(bool(beyond))


if __name__ == "__main__":
    raise SystemExit(main())
