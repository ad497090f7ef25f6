"""Seconds to nanoGPT's loss on four texts: wordrun's default against nanoGPT, which sets the mark with its CPU setting.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/texts.py texts
    python benchmarks/recipe.py --nanogpt nanoGPT texts/*.txt
    python benchmarks/recipe.py --nanogpt nanoGPT texts/shakespeare.txt --overrides experiment=fastest

The mark is the loss of nanoGPT's checkpoint after its 2,000 steps (README, "i only have a macbook") on the same
characters, divided alike. wordrun is evaluated every few steps. All losses are means over the whole validation split.
For each text, nanoGPT runs once and then wordrun with each seed, on the same cores.

Seconds are counted from the start of the process, without evaluations and checkpoints; compilation counts. wordrun is
ended as soon as nanoGPT's seconds have passed, and the loss after equal seconds is that of its last evaluation before.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vs_nanogpt import SHAPES, loss_of_checkpoint, nanogpt_command

CPU = SHAPES[0]
STEPS = 2000
WORDRUN = "tokenizer=char tracker=jsonl train.log_interval=1 train.sample_tokens=0 train.eval_iters=null"


@dataclass(frozen=True)
class Result:
    """One run of wordrun beside one of nanoGPT."""

    mark: float
    """nanoGPT's loss."""
    theirs: float
    """nanoGPT's seconds."""
    ours: float
    """wordrun's seconds to the mark; infinite: it did not reach it."""
    steps: int
    """wordrun's steps to the mark."""
    equal: float
    """wordrun's loss after nanoGPT's seconds."""


def timed_lines(
    command: Sequence[str], cwd: Path | None = None, enough: Callable[[str], bool] = lambda line: False
) -> list[tuple[float, str]]:
    """Run a command and return each line of its output with the seconds after which it came.

    The command is ended after the first line that is ``enough``.
    """
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
    lines = []
    for line in job.stdout:
        lines.append((time.monotonic() - start, line))
        if enough(line):
            job.kill()
            job.wait()
            return lines
    if job.wait():
        raise SystemExit("".join(line for _, line in lines))
    return lines


def seconds_of_nanogpt(lines: list[tuple[float, str]]) -> tuple[float, list[tuple[float, float]]]:
    """Return the seconds to the line of nanoGPT's last step, and seconds and loss of its evaluations.

    ``lines`` are from ``timed_lines``. An evaluation, whose line follows that of the step before it, does not count.
    """
    evaluated, last, curve = 0.0, 0.0, []
    for (before, _), (at, line) in zip([(0.0, ""), *lines], lines, strict=False):
        if found := re.search(r"^step \d+: train loss .* val loss ([\d.]+)", line):
            evaluated += at - before
            curve.append((last, float(found[1])))
        elif re.search(r"^iter \d+: loss", line):
            last = at - evaluated
    return last, curve[1:]


def points(start: float, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """Return step, seconds and loss of each of wordrun's evaluations.

    Args:
        start: seconds to the line of the first step.
        metrics: the lines of metrics.jsonl, one for each step.
    """
    found, seconds = [], start
    for line in metrics:
        if "val_loss" in line:
            found.append((line["step"], seconds, line["val_loss"]))
        elif "loss" in line and line["step"] > 1:
            seconds += line["dt"]
    return found


def compared(mark: float, theirs: float, evaluations: Sequence[tuple[int, float, float]]) -> Result:
    """Return when the ``evaluations`` (step, seconds, loss) reach the ``mark``, and their loss after ``theirs`` s."""
    reached = [(seconds, step) for step, seconds, loss in evaluations if loss <= mark]
    ours, steps = min(reached, default=(float("inf"), 0))
    in_time = [loss for _, seconds, loss in evaluations if seconds <= theirs]
    return Result(mark, theirs, ours, steps, in_time[-1] if in_time else float("inf"))


def run_nanogpt(nanogpt: Path, text: Path, scratch: Path, steps: int) -> tuple[float, float, list[tuple[float, float]]]:
    """Train nanoGPT and return its loss, its seconds, and seconds and loss of its evaluations."""
    folder = nanogpt / "data" / f"{text.stem}_char"
    if not (folder / "val.bin").exists():
        folder.mkdir(exist_ok=True)
        shutil.copy(text, folder / "input.txt")
        if not (folder / "prepare.py").exists():
            shutil.copy(nanogpt / "data" / "shakespeare_char" / "prepare.py", folder)
        timed_lines([sys.executable, "prepare.py"], folder)
    options = [*CPU.nanogpt(), f"--dataset={folder.name}", "--eval_iters=20", f"--lr_decay_iters={steps}"]
    options.append(f"--eval_interval={steps // 8 or 1}")
    lines = timed_lines(nanogpt_command(scratch / "ckpt", options, steps), nanogpt)
    mark = loss_of_checkpoint(nanogpt, scratch / "ckpt" / "ckpt.pt", CPU, folder.name)
    return mark, *seconds_of_nanogpt(lines)


def run_wordrun(
    text: Path, out: Path, overrides: Sequence[str], seed: int, seconds: float
) -> list[tuple[int, float, float]]:
    """Train wordrun with ``overrides`` for ``seconds``, and return ``points``."""
    first: list[float] = []

    def metrics() -> list[tuple[int, float, float]]:
        return points(first[0], [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])

    def enough(line: str) -> bool:
        if not first and re.search(r" step 1/[\d,]+ .*\bloss ", line):
            first.append(time.monotonic() - start)
        return bool(first) and "val_loss" in line and metrics()[-1][1] > seconds

    data = ["data=text", f"data.name={text.stem}", f"data.path={text}", *WORDRUN.split()]
    words = [*data, "train.eval_interval=20", *overrides, f"train.seed={seed}", f"hydra.run.dir={out}"]
    start = time.monotonic()
    timed_lines([sys.executable, "-m", "wordrun", *words], enough=enough)
    return metrics()


def row(name: str, results: Sequence[Result]) -> str:
    """Return a line of the table."""
    mark, theirs, ours, equal = (
        statistics.mean(getattr(each, field) for each in results) for field in ("mark", "theirs", "ours", "equal")
    )
    steps = "-".join(str(steps) for steps in sorted({each.steps for each in results}))
    return (
        f"| {name} | {mark:.3f} | {theirs:.1f} | {ours:.1f} | {steps} | {ours / theirs:.2f} | {equal:.3f} | "
        f"{equal - mark:+.3f} |"
    )


def plot(curves: Mapping[str, Mapping[str, list[tuple[float, float]]]], file: Path) -> None:
    """Draw loss against seconds: ``curves`` by text and by program."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(curves), figsize=(3.2 * len(curves), 3.2), squeeze=False, layout="constrained"
    )
    for axis, (text, programs) in zip(axes[0], curves.items(), strict=True):
        for program, curve in programs.items():
            axis.plot(*zip(*curve, strict=True), label=program)
        axis.set(title=text, xlabel="seconds", ylim=(None, 3.0))
    axes[0][0].set_ylabel("validation loss")
    axes[0][-1].legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", help="from benchmarks/texts.py")
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of wordrun")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per program")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the loss against seconds, of the last seed")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    parser.add_argument("--overrides", nargs="+", default=[], help="what wordrun trains instead of its default")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    steps, overrides = STEPS, args.overrides
    if args.smoke:
        steps, overrides = 6, [*overrides, "train.max_iters=4", "train.eval_interval=2"]
    table = [
        "| text | nanoGPT's loss | seconds | wordrun's seconds to it | steps | ratio | loss after equal seconds | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for text in args.texts:
            results = []
            mark, theirs, curve = run_nanogpt(args.nanogpt.resolve(), text, scratch, steps)
            for seed in args.seeds:
                ours = run_wordrun(text.resolve(), scratch / f"{text.stem}-{seed}", overrides, seed, theirs)
                results.append(compared(mark, theirs, ours))
                curves[text.stem] = {"nanoGPT": curve, "wordrun": [(seconds, loss) for _, seconds, loss in ours]}
                print(f"  {text.stem}, seed {seed}: {results[-1]}, final loss {ours[-1][2]:.4f}", flush=True)
            table.append(row(text.stem, results))
    print("\n".join(["", *table]))
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
