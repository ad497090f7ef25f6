"""Parity, two ranks against two threads, the trainer against a plain loop, start-up times, overhead of launch.

    python benchmarks/figures.py [parity ranks loop start launch]

What is compared runs alternately in the same call; reports medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import wordrun
from wordrun.train.hooks.base import Hook
from wordrun.train.trainer import Trainer

SAME = "train.dtype=fp32"
"""For comparisons of results: in bf16 every rank rounds its own gradients, and a plain loop would have to as well."""
QUIET = [
    "data=sample",
    "model=nano",
    "tracker=jsonl",
    "train.eval_interval=0",
    "train.sample_interval=0",
    "train.sample_tokens=0",
]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the training lines of a run."""
    return [m for m in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "loss" in m]


def train(out: Path, ranks: int, threads: int, *overrides: str) -> list[dict[str, float]]:
    """Train under launch and return the training lines."""
    command = [
        "launch",
        "-n",
        str(ranks),
        "--env",
        f"OMP_NUM_THREADS={threads}",
        sys.executable,
        "-m",
        "wordrun",
        *QUIET,
        f"hydra.run.dir={out}",
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out.parent)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return metrics(out)


def parity(scratch: Path) -> None:
    """The first 20 losses at 1, 2 and 4 ranks with the same global batch, in fp32."""
    losses = {}
    for ranks in (1, 2, 4):
        lines = train(
            scratch / f"parity{ranks}",
            ranks,
            1,
            "train.max_iters=20",
            "train.log_interval=1",
            f"model.batch_size={12 // ranks}",
            "optimizer.warmup_iters=5",
            SAME,
        )
        losses[ranks] = [m["loss"] for m in lines]
    for ranks in (2, 4):
        worst = max(abs(a - b) / a for a, b in zip(losses[1], losses[ranks], strict=True))
        print(
            f"| largest relative difference of the first 20 losses, {ranks} ranks to 1 | {worst:.1e} | at most 1e-5 |"
        )


def ranks_or_threads(scratch: Path, rounds: int) -> None:
    """Two single-threaded ranks against one rank with two threads, with the same global batch."""
    speed: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for ranks in (1, 2):
            lines = train(
                scratch / f"ranks{ranks}-{number}",
                ranks,
                2 // ranks,
                "train.max_iters=300",
                f"model.batch_size={12 // ranks}",
            )
            steps = [(b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in pairwise(lines[2:])]
            speed[ranks].append(12 * 64 / statistics.median(steps))
    one, two = (statistics.median(speed[ranks]) for ranks in (1, 2))
    ratios = [b / a for a, b in zip(speed[1], speed[2], strict=True)]
    print(f"| tokens/s, 1 rank of 2 threads | {one:,.0f} | |")
    print(f"| tokens/s, 2 ranks of 1 thread | {two:,.0f} | |")
    print(f"| ratio, median of {rounds} rounds | {statistics.median(ratios):.3f} | at least 0.9 |")


class BareStep(Hook):
    """After each step of the trainer, takes the same step on a second model in plain PyTorch, and times both."""

    def __init__(self) -> None:
        self.trainer_s: list[float] = []
        self.bare_s: list[float] = []
        self._left = 0.0

    def at_start(self, trainer: Any) -> None:
        """Build the second model."""
        import torch

        from wordrun.model.construction import build
        from wordrun.train.optim.adamw import adamw
        from wordrun.train.optim.options import AdamWConfig

        self.model = build(trainer.cfg.model, trainer.task.vocab_size)
        assert isinstance(trainer.cfg.optimizer, AdamWConfig)
        self.optimizer = adamw(trainer.cfg.optimizer, self.model.named_parameters())
        self.backward, self.clip = torch.autograd.backward, torch.nn.utils.clip_grad_norm_

    def after_step(self, trainer: Any) -> None:
        """Time what the trainer did since the last call, then a plain step."""
        arrived = time.perf_counter()
        if self._left:
            self.trainer_s.append(arrived - self._left)
        size = trainer.cfg.model.batch_size
        begin = time.perf_counter()
        batch = trainer.task.sequences.batch(trainer.step * size, size)
        self.backward(self.model.losses(batch).mean())
        self.clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._left = time.perf_counter()
        self.bare_s.append(self._left - begin)


def loop(scratch: Path, steps: int) -> None:
    """The trainer's loop with default logging against a plain loop, in alternate steps."""
    bare = BareStep()
    cfg = wordrun.compose([*QUIET, SAME, f"train.max_iters={steps}", f"hydra.run.dir={scratch / 'loop'}"])
    with Trainer(cfg, hooks=[bare]) as trainer:
        trainer.train()
    ours, theirs = statistics.median(bare.trainer_s[10:]), statistics.median(bare.bare_s[10:])
    print(f"| median step of a plain PyTorch loop [ms] | {1000 * theirs:.2f} | |")
    print(f"| median step of the trainer [ms] | {1000 * ours:.2f} | |")
    print(f"| cost of the loop | {100 * (ours / theirs - 1):+.1f} % | less than 2 % |")


def wall(command: list[str], env: dict[str, str] | None = None) -> float:
    """Return the wall seconds of a command, with the variables ``env`` added."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **(env or {})})
    return time.perf_counter() - begin


def start(rounds: int) -> None:
    """Start-up times of the commands, and what launch adds to mpiexec."""
    os.environ["HYDRA_FULL_ERROR"] = "0"
    for command, limit in (
        ("launch --help", 0.15),
        ("launch --dry-run -n 2 python -m wordrun", 0.15),
        ("wordrun --help", 0.8),
    ):
        times = [wall(command.split()) for _ in range(rounds)]
        print(f"| `{command}` [s] | {statistics.median(times):.3f} | less than {limit} |")
    with_launch, bare = [], []
    for _ in range(rounds):
        with_launch.append(wall(["launch", "-n", "2", "true"]))
        bare.append(wall(["mpiexec", "-n", "2", "true"]))
    added = statistics.median(a - b for a, b in zip(with_launch, bare, strict=True))
    print(f"| `launch -n 2 true` over `mpiexec -n 2 true` [s] | {added:.3f} | less than 0.15 |")


def big_jobs(scratch: Path, rounds: int) -> None:
    """launch in jobs with many hosts, the cost of its wrapper per rank, and its memory."""
    from wordrun.launch.launchers.base import RANK_ENV

    for hosts, limit in ((10_000, 0.15), (100_000, 1.0)):
        nodefile = scratch / f"hosts{hosts}"
        nodefile.write_text("".join(f"x{i:06d}s0b0n0.hsn\n" for i in range(hosts)))
        jobs = {
            "node file": {"PBS_JOBID": "1.server", "PBS_NODEFILE": str(nodefile)},
            "host list": {
                "SLURM_JOB_ID": "1",
                "SLURM_JOB_NODELIST": f"nid[000001-{hosts:06d}]",
                "SLURM_JOB_CPUS_PER_NODE": f"128(x{hosts})",
            },
        }
        for name, job in jobs.items():
            command = ["launch", "--dry-run", "--launcher", "hydra", "true"]
            times = [wall(command, job) for _ in range(rounds)]
            print(
                f"| `launch --dry-run`, {name} of {hosts:,} [s] | {statistics.median(times):.3f} | less than {limit} |"
            )
    rank = {
        "WORDRUN_LAUNCHER": "srun",
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    wrapped, bare = [], []
    for _ in range(20 * rounds):
        wrapped.append(wall(["/bin/sh", RANK_ENV, "true"], rank))
        bare.append(wall(["true"]))
    cost = 1000 * (statistics.median(wrapped) - statistics.median(bare))
    print(f"| `rank_env.sh` per rank [ms] | {cost:.2f} | less than 5 |")
    running = subprocess.Popen(["launch", "-n", "2", "sleep", "2"])
    time.sleep(1)
    status = Path(f"/proc/{running.pid}/status").read_text()
    running.wait()
    memory = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1000
    print(f"| memory of launch itself [MB] | {memory:.0f} | less than 60 |")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts",
        nargs="*",
        default=["parity", "ranks", "loop", "start", "launch"],
        help="what to measure (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| figure | measured | target |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if "parity" in args.parts:
            parity(scratch)
        if "ranks" in args.parts:
            ranks_or_threads(scratch, args.rounds)
        if "loop" in args.parts:
            loop(scratch, 100 * args.rounds)
        if "start" in args.parts:
            start(2 * args.rounds + 1)
        if "launch" in args.parts:
            big_jobs(scratch, 2 * args.rounds + 1)


if __name__ == "__main__":
    main()
