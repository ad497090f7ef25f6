"""wordrun against nanoGPT on tiny Shakespeare: same shapes, same schedule, alternating on the same machine.

    git clone https://github.com/karpathy/nanoGPT
    python nanoGPT/data/shakespeare_char/prepare.py
    python benchmarks/vs_nanogpt.py --nanogpt nanoGPT

Quality: both train to the end of nanoGPT's CPU schedule and are evaluated by the mean loss over every window of the
validation split, nanoGPT with the checkpoint that it kept. Speed: both programs are started, then paused and resumed
alternately for several steps, so that other load slows both; reports the median wall time per step, including logging.
With --compile both are also started with torch.compile (wordrun with train.compile_scope=model), and take turns with
the two that are not compiled. The time of compiling is not in the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SKIP = 10  # the first steps allocate memory


@dataclass(frozen=True)
class Shape:
    """One setting, as the options of both programs."""

    name: str
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int
    dropout: float
    steps: int
    turn_s: float

    def nanogpt(self) -> list[str]:
        """Return nanoGPT's options besides its config/train_shakespeare_char.py."""
        names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dropout")
        return [f"--{name}={getattr(self, name)}" for name in names]

    def wordrun(self) -> list[str]:
        """Return wordrun's overrides."""
        names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dropout")
        return [f"model.{name}={getattr(self, name)}" for name in names]


SHAPES = (
    Shape("nanoGPT's CPU setting (4 layers, 4 heads, 128, block 64, batch 12)", 4, 4, 128, 64, 12, 0.0, 500, 2.0),
    Shape("experiment=shakespeare at batch 16 (6 layers, 6 heads, 384, block 256)", 6, 6, 384, 256, 16, 0.2, 30, 20.0),
)


def nanogpt_command(out: Path, options: list[str], steps: int, compiled: bool = False) -> list[str]:
    """Return the command that trains nanoGPT, to run in its folder."""
    return [
        sys.executable,
        *shlex.split("-u train.py config/train_shakespeare_char.py --device=cpu"),
        f"--compile={compiled}",
        f"--out_dir={out}",
        "--log_interval=1",
        f"--max_iters={steps}",
        *options,
    ]


def nanogpt_steps(text: str) -> list[float]:
    """Return the seconds of each step in nanoGPT's output after the first few."""
    times = re.findall(r"^iter \d+: loss .* time ([\d.]+)ms", text, re.MULTILINE)
    return [float(ms) / 1000 for ms in times][SKIP:]


def wordrun_command(out: Path, options: list[str], steps: int) -> list[str]:
    """Return the command that trains wordrun."""
    return [
        sys.executable,
        *shlex.split("-m wordrun data=shakespeare data.offline=error tracker=jsonl model=nano train.compile=false"),
        f"hydra.run.dir={out}",
        f"train.max_iters={steps}",
        "train.log_interval=1",
        *options,
    ]


def wordrun_steps(out: Path) -> list[float]:
    """Return the seconds of each step of a wordrun run after the first few, logging included."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    clock = [line["time"] for line in lines if "loss" in line]
    return [after - before for before, after in pairwise(clock)][SKIP:]


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command and return its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def in_turns(commands: list[tuple[list[str], Path | None, Path]], turn_s: float) -> None:
    """Run commands until all finish, each in turn for ``turn_s`` seconds while the others are paused.

    Args:
        commands: each with its working directory and the file for its output.
        turn_s: long enough for many steps.
    """
    jobs: list[subprocess.Popen[bytes]] = []
    try:
        for command, cwd, log in commands:
            with log.open("w") as file:
                jobs.append(
                    subprocess.Popen(command, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
                )
            os.killpg(jobs[-1].pid, signal.SIGSTOP)
        while running := [job for job in jobs if job.returncode is None]:
            for job in running:
                os.killpg(job.pid, signal.SIGCONT)
                try:
                    job.wait(turn_s)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGSTOP)
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    for job, (_, _, log) in zip(jobs, commands, strict=True):
        if job.returncode:
            raise SystemExit(log.read_text())


def speed(
    nanogpt: Path, shape: Shape, rounds: int, scratch: Path, compiled: bool
) -> dict[tuple[bool, bool], list[tuple[float, float]]]:
    """Time both programs in turns.

    Args:
        nanogpt: the clone.
        shape: the setting.
        rounds: how often.
        scratch: a folder for what the programs write.
        compiled: time both programs with torch.compile, too.

    Returns:
        For each pair (wordrun compiled, nanoGPT compiled): the median tokens/s of wordrun and of nanoGPT in each round.
    """
    ways = (False, True) if compiled else (False,)
    ours_options = [*shape.wordrun(), "train.eval_interval=0", "train.sample_interval=0", "train.sample_tokens=0"]
    theirs_options = [*shape.nanogpt(), "--eval_interval=100000", "--eval_iters=1"]
    pairs: dict[tuple[bool, bool], list[tuple[float, float]]] = {(a, b): [] for a in ways for b in ways}
    tokens = shape.batch_size * shape.block_size
    for number in range(rounds):
        outs = {way: scratch / f"w{number}-{shape.n_layer}-{way}" for way in ways}
        logs = {way: scratch / f"nanogpt-{way}.log" for way in ways}
        commands: list[tuple[list[str], Path | None, Path]] = []
        for way in ways:
            options = [*ours_options, *(["train.compile=true", "train.compile_scope=model"] if way else [])]
            commands.append((wordrun_command(outs[way], options, shape.steps), None, scratch / f"wordrun-{way}.log"))
            theirs = nanogpt_command(scratch / f"n-{way}", theirs_options, shape.steps, way)
            commands.append((theirs, nanogpt, logs[way]))
        in_turns(commands, shape.turn_s)
        for a, b in pairs:
            fast = tokens / statistics.median(wordrun_steps(outs[a]))
            pairs[a, b].append((fast, tokens / statistics.median(nanogpt_steps(logs[b].read_text()))))
            ratio = pairs[a, b][-1][0] / pairs[a, b][-1][1]
            print(f"  round {number + 1}: {label(a, b)}: wordrun / nanoGPT = {ratio:.3f}", flush=True)
    return pairs


def label(ours: bool, theirs: bool) -> str:
    """Return which of the two programs are compiled, in words."""
    names = [name for name, compiled in (("wordrun", ours), ("nanoGPT", theirs)) if compiled]
    return f"{' and '.join(names)} compiled" if names else "not compiled"


def quality(nanogpt: Path, shape: Shape, scratch: Path, seeds: list[int]) -> tuple[list[float], list[float]]:
    """Return the validation losses, one per seed, of wordrun at the end and of nanoGPT's kept checkpoint."""
    ours, theirs = [], []
    for seed in seeds:
        out = scratch / f"q{seed}"
        options = [f"train.seed={seed}", "train.eval_interval=2000", "train.eval_iters=null", "train.sample_interval=0"]
        run(wordrun_command(out, [*shape.wordrun(), *options], 2000))
        ours.append(json.loads((out / "run.json").read_text())["val_loss"])
        schedule = ["--eval_iters=20", "--lr_decay_iters=2000"]
        run(nanogpt_command(scratch / "ckpt", [*shape.nanogpt(), *schedule], 2000), cwd=nanogpt)
        theirs.append(loss_of_checkpoint(nanogpt, scratch / "ckpt" / "ckpt.pt", shape))
        print(f"  seed {seed}: wordrun {ours[-1]:.4f}, nanoGPT {theirs[-1]:.4f}", flush=True)
    return ours, theirs


def loss_of_checkpoint(nanogpt: Path, checkpoint: Path, shape: Shape, dataset: str = "shakespeare_char") -> float:
    """Return the mean loss of a nanoGPT checkpoint over the windows of ``dataset`` that wordrun evaluates."""
    import numpy as np
    import torch

    from wordrun.data.validation_set import ValidationSequences, ValidationTokens

    sys.path.insert(0, str(nanogpt))
    import model as theirs  # type: ignore[import-not-found]

    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)  # written by this script's own run
    gpt = theirs.GPT(theirs.GPTConfig(**saved["model_args"]))
    gpt.load_state_dict(saved["model"])
    gpt.eval()
    val = np.fromfile(nanogpt / "data" / dataset / "val.bin", dtype=np.uint16)
    windows = ValidationSequences(ValidationTokens(val, shape.block_size), shape.batch_size, None)
    total = count = 0.0
    with torch.no_grad():
        for i in range(len(windows)):
            batch, weights = windows[i]
            logits, _ = gpt(batch.tokens, batch.targets)
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none").mean(1)
            total += float((losses.double() * weights).sum())
            count += float(weights.sum())
    return total / count


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT with its data prepared")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program per setting (default 3)")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1337], help="seeds of the quality runs")
    numbers = [*range(1, len(SHAPES) + 1)]
    parser.add_argument("--settings", type=int, nargs="+", default=numbers, choices=numbers, help="default: all")
    parser.add_argument("--compile", action="store_true", help="time both with torch.compile, too")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per program")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no paused program remains
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    nanogpt = args.nanogpt.resolve()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        rows = []
        for shape in [SHAPES[number - 1] for number in args.settings]:
            print(shape.name, flush=True)
            for ways, rates in speed(nanogpt, shape, args.rounds, scratch, args.compile).items():
                ours, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
                ratios = [a / b for a, b in rates]
                ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                rows.append(f"| tokens/s, {shape.name}, {label(*ways)} | {ours:,.0f} | {theirs:,.0f} | {ratio} |")
        if args.seeds:
            print("validation loss after 2000 steps", flush=True)
            a, b = quality(nanogpt, SHAPES[0], scratch, args.seeds)
            ours, theirs = statistics.median(a), statistics.median(b)
            rows.append(
                f"| loss, whole validation split, CPU setting | {ours:.4f} | {theirs:.4f} | {ours / theirs:.4f} |"
            )
    print("\n| | wordrun | nanoGPT | wordrun / nanoGPT |\n|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
