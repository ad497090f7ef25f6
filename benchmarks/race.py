"""Seconds to a loss on tiny Shakespeare: wordrun against nanoGPT, which set the mark with its own CPU setting.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/race.py --nanogpt nanoGPT
    python benchmarks/race.py --nanogpt nanoGPT -- experiment=fastest model.depth=2

The mark is the loss of nanoGPT's checkpoint after its 2,000 steps (README, "i only have a macbook"). wordrun trains for
a fixed number of steps; what counts is the loss of its weights at the end. Both losses are means over the whole
validation split. The programs run in turns on the same cores, wordrun with another seed each time. It has won if its
mean loss is below the mark with p < 0.01 in a one-sided t-test, as modded-nanogpt's rules require.

Seconds are counted from the start of the process to the line of the last step, without evaluations; "without start-up"
from the line of the first step. First class: at most 0.83 million parameters, blocks of 64 characters.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vs_nanogpt import SHAPES, loss_of_checkpoint, nanogpt_command
from wordrun.config.compose import data_home

CPU = SHAPES[0]
STEPS = 2000
WORDRUN = [
    "data.offline=error",
    "tracker=jsonl",
    "train.log_interval=1",
    "train.sample_tokens=0",
    "train.eval_iters=null",
]


@dataclass(frozen=True)
class Result:
    """One run of either program."""

    seconds: float
    """From the start of the process to the end of the last step."""
    stepping: float
    """From the end of the first step."""
    steps: int
    loss: float
    parameters: int = 0
    batch: int = CPU.batch_size
    """Sequences of a step."""


def timed_lines(command: Sequence[str], cwd: Path | None = None) -> list[tuple[float, str]]:
    """Run a command and return each line of its output with the seconds after which it came."""
    start = time.monotonic()
    job = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert job.stdout is not None
    lines = [(time.monotonic() - start, line) for line in job.stdout]
    if job.wait():
        raise SystemExit("".join(line for _, line in lines))
    return lines


def between(lines: list[tuple[float, str]], step: str, evaluation: str) -> tuple[float, float, int]:
    """Return the seconds to the last step, those after the first step, and the number of lines about steps.

    Args:
        lines: from ``timed_lines``.
        step: regular expression of the line after a step.
        evaluation: of the line after an evaluation, which began with the line before; its time does not count.
    """
    evaluated = 0.0
    ends = []
    for (before, _), (at, line) in zip([(0.0, ""), *lines], lines, strict=False):
        if re.search(evaluation, line):
            evaluated += at - before
        elif re.search(step, line):
            ends.append(at - evaluated)
    return ends[-1], ends[-1] - ends[0], len(ends)


def run_nanogpt(nanogpt: Path, scratch: Path, steps: int, interval: int) -> Result:
    """Train nanoGPT and return its result; ``interval`` is the number of steps between its evaluations."""
    options = [*CPU.nanogpt(), "--eval_iters=20", f"--eval_interval={interval}", f"--lr_decay_iters={steps}"]
    lines = timed_lines(nanogpt_command(scratch / "ckpt", options, steps), nanogpt)
    figures = between(lines, r"^iter \d+: loss", r"^step \d+: train loss")
    return Result(*figures, loss_of_checkpoint(nanogpt, scratch / "ckpt" / "ckpt.pt", CPU))


def run_wordrun(out: Path, overrides: Sequence[str], seed: int) -> Result:
    """Train wordrun with ``overrides`` and return its result."""
    command = [sys.executable, "-m", "wordrun", *WORDRUN, *overrides, f"train.seed={seed}", f"hydra.run.dir={out}"]
    seconds, _, _ = between(timed_lines(command), r" step [\d,]+/[\d,]+ .*\bloss ", r"\bval_loss ")
    record = json.loads((out / "run.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = [line["time"] for line in lines if "loss" in line]  # on the screen are fewer
    stepping = times[-1] - times[0]
    return Result(seconds, stepping, len(times), record["val_loss"], record["parameters"], record["global_batch_size"])


def prepare(nanogpt: Path) -> None:
    """Let nanoGPT tokenize the text that wordrun uses, unless it has done so."""
    folder, text = nanogpt / "data" / "shakespeare_char", Path(data_home()) / "shakespeare" / "input.txt"
    if (folder / "val.bin").exists():
        return
    if text.exists():
        shutil.copy(text, folder / "input.txt")
    timed_lines([sys.executable, "prepare.py"], folder)


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    """Return ``values`` as mean and, if there are several, standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def row(name: str, results: Sequence[Result]) -> str:
    """Return a line of the table."""
    first = results[0]
    columns = [
        name,
        f"{first.parameters:,}" if first.parameters else "",
        mean_and_deviation([each.seconds for each in results], 1),
        mean_and_deviation([each.stepping for each in results], 1),
        f"{first.steps:,}",
        f"{first.steps * first.batch * CPU.block_size:,}",
        mean_and_deviation([each.loss for each in results], 4),
    ]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    """Race and print the table."""
    from scipy import stats  # type: ignore[import-untyped]  # comes with scikit-learn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program (default 5; 1 has no p)")
    parser.add_argument("--seed", type=int, default=1, help="seed of wordrun's first run (default 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per program")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    parser.add_argument("overrides", nargs="*", default=["experiment=fastest"], help="what wordrun trains")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    nanogpt, overrides = args.nanogpt.resolve(), args.overrides
    steps, interval = (6, 3) if args.smoke else (STEPS, 250)
    if args.smoke:
        overrides = [*overrides, "train.max_iters=4", "train.eval_interval=4"]
    prepare(nanogpt)
    theirs, ours = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.seed, args.seed + args.rounds):
            theirs.append(run_nanogpt(nanogpt, Path(scratch), steps, interval))
            ours.append(run_wordrun(Path(scratch) / f"run{seed}", overrides, seed))
            for name, result in (("nanoGPT", theirs[-1]), ("wordrun", ours[-1])):
                print(f"  seed {seed}, {name}: {result.seconds:.1f} s, loss {result.loss:.4f}", flush=True)
    mark = statistics.mean(each.loss for each in theirs)
    print("\n| | parameters | seconds | without start-up | steps | tokens | loss |\n|---|---|---|---|---|---|---|")
    print(row("nanoGPT", theirs))
    print(row(f"wordrun {' '.join(overrides)}", ours))
    whole, stepping = (
        statistics.mean(getattr(each, figure) for each in theirs)
        / statistics.mean(getattr(each, figure) for each in ours)
        for figure in ("seconds", "stepping")
    )
    print(f"\nnanoGPT's seconds / wordrun's: {whole:.2f}, without start-up {stepping:.2f}")
    if len(ours) > 1:
        p = stats.ttest_1samp([each.loss for each in ours], mark, alternative="less").pvalue
        print(f"p = {p:.2g} that the mean loss is not below {mark:.4f}: {'won' if p < 0.01 else 'not won (p < 0.01)'}")


if __name__ == "__main__":
    main()
