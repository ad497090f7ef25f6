"""What checkpoints in memory add to steps, and how much memory they take: GPT-2 small (124M), two simulated nodes.

    python benchmarks/memory_checkpoints.py                  10 minutes on two cores, 5 GB in /dev/shm
    python benchmarks/memory_checkpoints.py model=nano       seconds, to see that it works

Within one run of two ranks, windows of ten steps alternate: one begins with a checkpoint in memory, which must be
complete at its end, and the next has none. On real nodes, copying to another node does not share the cores and the
memory of one machine as it does here. A virtual machine may have to request memory that was free for some
seconds from its host again, at a tenth of the speed; so each window begins by touching that memory.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wordrun
from wordrun.dist import session
from wordrun.train.hooks.base import Hook

INTERVAL, NEVER = 10, 10**9
WORDS = shlex.split("""
    data=sample tracker=jsonl model=gpt2 model.batch_size=1 train.dtype=fp32 train.device=cpu
    train.eval_interval=0 train.sample_tokens=0 train.checkpoint_interval=0 train.check_memory=false
""")


class Windows(Hook):
    """Times windows of steps, every other one with a checkpoint in memory, and watches the memory that they take."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.waits: list[float] = []
        self.rest, self.peak, self._since, self._saves = 0, 0, 0.0, False
        self.share = 0
        """Bytes of the state per node."""
        self._ended = threading.Event()

    def at_start(self, trainer: Any) -> None:
        """Watch the memory."""
        self.share = sum(p.numel() * p.element_size() for p in trainer.backend.parts[0].parameters()) * 3 // 2
        threading.Thread(target=self._watch, daemon=True).start()

    def after_step(self, trainer: Any) -> None:
        """End a window, and begin the next: this runs before the hook that saves."""
        if trainer.step % INTERVAL:
            return
        saves = trainer.hooks["MemoryCheckpoint"].saves
        saves.wait()
        dist.barrier()
        now = time.perf_counter()
        if trainer.step > INTERVAL:  # not the first: it warms up
            self.seconds[self._saves].append(now - self._since)
            self.rest = used(self.root)
        torch.ones(2 * self.share, dtype=torch.uint8)  # used and freed at once: two files of a rank
        dist.barrier()
        self._saves = trainer.step // INTERVAL % 2 == 0
        saves.interval, self._since = INTERVAL if self._saves else NEVER, time.perf_counter()

    def before_step(self, trainer: Any) -> None:
        """Note how long the step waited for the copy."""
        if trainer.step % INTERVAL == 0 and self._saves:
            self.waits.append(time.perf_counter() - self._since)

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = max(self.peak, used(self.root))


def used(root: Path) -> int:
    """Return the bytes that the files below ``root`` take now."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except OSError:  # it has just been removed
                continue
    return total


def as_ranks(home: Path, windows: int, words: list[str]) -> None:
    """Run as one of the two ranks."""
    root = home / f"node{os.environ['RANK']}"
    root.mkdir()
    os.environ["WORDRUN_SHM"] = str(root)
    hook = Windows(root)
    options = [*WORDS, f"train.memory_checkpoint_interval={INTERVAL}", f"hydra.run.dir={home}/run", *words]
    with session() as world:
        cfg = wordrun.compose([*options, f"train.max_iters={(2 * windows + 1) * INTERVAL + 1}"])
        with wordrun.Trainer(cfg, world, hooks=[hook]) as trainer:
            trainer.train()
    if world.rank:
        return
    plain, saving = (statistics.median(hook.seconds[kind]) for kind in (False, True))
    for kind, each in hook.seconds.items():
        print(f"{INTERVAL} steps {'with' if kind else 'without'} a checkpoint: {[round(s, 2) for s in each]} s")
    print(f"a checkpoint every {INTERVAL} steps adds {saving / plain - 1:.1%} to the steps' time (goal: 3 %)")
    print(f"the step after it waits {statistics.median(hook.waits):.2f} s for the copy")
    rest, peak = hook.rest / hook.share, hook.peak / hook.share
    held = f"a node holds {rest:.2f} times as much, and at most {peak:.2f} times"
    print(f"state / nodes is {hook.share / 1e9:.2f} GB; {held}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4, help="windows of ten steps with, and as many without")
    parser.add_argument("--home", type=Path, default=Path("/dev/shm"), help="file system in memory")
    parser.add_argument("--as-ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="options of the run, such as model.block_size=256")
    args = parser.parse_args()
    if args.as_ranks:
        as_ranks(args.as_ranks, args.windows, args.words)
        return
    with tempfile.TemporaryDirectory(prefix="memory-checkpoints-", dir=args.home) as home:
        launch = [str(Path(sys.executable).with_name("launch")), "-n", "2", "--", sys.executable, __file__]
        subprocess.run([*launch, "--as-ranks", home, "--windows", str(args.windows), *args.words], check=True)


if __name__ == "__main__":
    main()
