"""How close ``wordrun plan`` comes to the memory of ranks, over the backends on 1, 2 and 4 ranks of this machine.

    python benchmarks/plan.py DIR            # 250 million parameters
    python benchmarks/plan.py DIR --small    # 25 million: 3 GB, and 4 minutes on 2 cores
    python benchmarks/plan.py DIR --small --ranks 2 --backends deepspeed:stage=1,deepspeed:stage=3,diloco,3D:tp=1

On a CPU, the memory of a rank is that of its process, of which torch and other libraries take a few hundred MiB that
the plan does not count. So two depths are measured, and their difference is compared with what the plan says. Start it
again with the same DIR to continue.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path

LIMIT = 1.15
# One thread per rank, since ranks share cores; glibc keeps no memory that was freed.
LAUNCH = "--launch=--env OMP_NUM_THREADS=1 --env MALLOC_MMAP_THRESHOLD_=262144"
STUDY = ["--steps", "3", "--repeats", "1", LAUNCH]
MODEL = [
    "data=sample",
    "model=nano",
    "train.dtype=fp32",
    "train.device=cpu",
    "model.block_size=32",
    "model.batch_size=1",
]
LARGE = ["model.n_embd=1024", "model.n_head=16"]
SMALL = ["model.n_embd=512", "model.n_head=8"]
FEWEST = 4  # blocks of the shallow model, one for each rank of a pipeline


def study(folder: Path, blocks: int, options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Measure the model with so many blocks, or what is left of it; return the rows of its points by their names."""
    words = [*STUDY, "--ranks", options.ranks, "--backends", options.backends, "--out", str(folder)]
    words += [*MODEL, *(SMALL if options.small else LARGE), f"model.n_layer={blocks}"]
    done = subprocess.run([sys.executable, "-m", "wordrun.study", "scaling", *words], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    with (folder / "points.csv").open(newline="") as file:
        return {row["point"]: row for row in csv.DictReader(file) if row["state"] == "done"}


def planned(row: dict[str, str]) -> float | None:
    """Return the memory [GiB] that the plan expects of a point's ranks; None: it has no estimate."""
    overrides = [word for word in shlex.split(row["overrides"]) if "=" in word]
    target = ["plan.device=cpu", f"plan.ranks={row['ranks']}", "plan.memory=1024"]
    words = [sys.executable, "-m", "wordrun.plan", "--json", *target, *overrides]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["strategies"]
    rows = {strategy["name"]: strategy for strategy in found}
    memory = rows.get("as asked", rows["DDP"]).get("memory")
    return float(next(iter(memory.values()))["total"]) / 2**30 if memory else None


def main() -> int:
    """Compare all points, and return 1 if an estimate is missing or beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--backends", default="DDP,FSDP,TP,PP")
    options = parser.parse_args()
    depths = FEWEST, 8 if options.small else 20
    shallow, deep = (study(options.dir / f"{blocks}", blocks, options) for blocks in depths)
    beyond = []
    print(f"\n| point | {depths[1] - depths[0]} blocks take [GiB] | planned | ratio |\n| --- | ---: | ---: | ---: |")
    for point, row in deep.items():
        before, after = planned(shallow[point]), planned(row)
        if before is None or after is None:
            beyond.append(f"{point}: no estimate")
            continue
        more, expected = float(row["memory_gib"]) - float(shallow[point]["memory_gib"]), after - before
        print(f"| {point} | {more:.3f} | {expected:.3f} | {more / expected:.2f} |")
        if not 1 / LIMIT <= more / expected <= LIMIT:
            beyond.append(f"{point}: the blocks take {more / expected:.2f} times the estimate")
    print("", *(beyond or [f"all are within {LIMIT}"]), sep="\n")
    return int(bool(beyond))


if __name__ == "__main__":
    raise SystemExit(main())
