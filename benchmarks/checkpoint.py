"""How long a save blocks training, and how long resuming takes: GPT-2 small (124M) on two CPU ranks.

    python benchmarks/checkpoint.py                      both parts, in a temporary folder (6 GB)

1. Within one run, alternately: how long a ``torch.save`` of the same state by rank 0 blocks the ranks, and how long
   ``trainer.save`` does. The file system's cache is flushed in between.
2. Complete commands, alternately: the time to the first step, fresh and resumed, with the page cache dropped before
   each if permitted, against the rate at which the checkpoint's files can be read from disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wordrun
from wordrun.dist import session
from wordrun.train.hooks.base import Hook

WORDS = shlex.split("""
    data=sample tracker=jsonl model=gpt2 model.block_size=64 model.batch_size=1 model.vocab_size=50304
    train.dtype=fp32 train.device=cpu train.eval_interval=0 train.sample_tokens=0 train.log_interval=1
    optimizer.lr_decay_iters=100
""")


class Saves(Hook):
    """A hook that saves after every step, alternately with trainer.save and torch.save."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.seconds: dict[str, list[float]] = {"torch.save": [], "trainer.save": []}

    def after_step(self, trainer: Any) -> None:
        trainer.checkpoints.wait()
        os.sync()
        dist.barrier()
        backend, begin = trainer.backend, time.perf_counter()
        if trainer.step % 2:
            if trainer.world.rank == 0:
                state = {"model": backend.model_state(), "optimizer": backend.optimizer.state_dict()}
                torch.save(state, self.home / "blocking.pt")
            dist.barrier()
        else:
            trainer.save()
        kind = "torch.save" if trainer.step % 2 else "trainer.save"
        self.seconds[kind].append(time.perf_counter() - begin)


def as_ranks(home: Path, rounds: int) -> None:
    """Run as one of the ranks of part 1."""
    hook = Saves(home)
    words = [*WORDS, f"train.max_iters={2 * rounds}", "train.checkpoint_interval=1000", f"hydra.run.dir={home}/run"]
    with session() as world, wordrun.Trainer(wordrun.compose(words), world, hooks=[hook]) as trainer:
        trainer.train()
        if world.rank == 0:
            (home / "seconds.json").write_text(json.dumps(hook.seconds))


def drop_cache() -> bool:
    """Drop the page cache, so that the next read comes from disk; return whether that was permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def read_rate(folder: Path) -> tuple[int, float]:
    """Return the bytes of a checkpoint, and the rate of reading them sequentially in bytes/s."""
    drop_cache()
    total, begin = 0, time.perf_counter()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(2**24):
                    total += len(chunk)
    return total, total / (time.perf_counter() - begin)


def first_step(launch: list[str], *words: str) -> float:
    """Return the seconds from the start of a command to the log line of its first step."""
    drop_cache()
    begin = time.perf_counter()
    with subprocess.Popen([*launch, "-m", "wordrun", *WORDS, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " INFO step " in line:
                seconds = time.perf_counter() - begin
                process.communicate()
                return seconds
    raise SystemExit(f"no step: status {process.returncode}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="saves of each kind, and starts of each kind")
    parser.add_argument("--home", type=Path, help="working directory (default: a temporary one)")
    parser.add_argument("--as-ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_ranks:
        as_ranks(args.home, args.rounds)
        return
    home = args.home or Path(tempfile.mkdtemp(prefix="checkpoint-"))
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    launch = [str(Path(sys.executable).with_name("launch")), "-n", "2", "--", sys.executable]
    again = [__file__, "--as-ranks", "--home", str(home), "--rounds", str(args.rounds)]
    subprocess.run([*launch, *again], check=True, stdout=subprocess.DEVNULL)
    seconds = json.loads((home / "seconds.json").read_text())
    for kind, each in seconds.items():
        print(f"{kind:<13} blocks training for {statistics.median(each):.3f} s; each: {[round(s, 3) for s in each]}")
    later = seconds["trainer.save"][1:]
    ratio = statistics.median(seconds["torch.save"]) / statistics.median(later)
    print(f"after the first, a save blocks training for 1/{ratio:.1f} of the time of a torch.save")

    newest = (home / "run/checkpoints/latest").resolve()
    step = int(newest.name.partition("-")[2])
    size, rate = read_rate(newest)
    print(f"the checkpoint has {size / 1e9:.2f} GB, read from disk at {rate / 1e6:.0f} MB/s")
    fresh, resumed = [], []
    for i in range(args.rounds):
        none = "train.checkpoint_interval=0"
        fresh.append(first_step(launch, "train.max_iters=1", none, f"hydra.run.dir={home}/fresh{i}"))
        words = (f"train.max_iters={step + 1}", none, f"train.resume={newest}", f"hydra.run.dir={home}/on{i}")
        resumed.append(first_step(launch, *words))
    more = statistics.median(resumed) - statistics.median(fresh)
    print(f"to the first step: fresh {[round(s, 1) for s in fresh]} s, resumed {[round(s, 1) for s in resumed]} s")
    allowed = 2 + size / (0.8 * rate)
    print(
        f"resuming takes {more:.1f} s longer; the limit, 2 s and reading at 80 % of the disk's rate, is {allowed:.1f} s"
    )


if __name__ == "__main__":
    main()
