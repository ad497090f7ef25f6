"""Pipeline bubbles: a timeline of each schedule as a picture, and its idle time against the formula.

    launch -n 2 python benchmarks/pipeline.py [--png FILE] [overrides]

Each schedule trains for a few steps; the one with the median idle time is drawn. A rank is busy during a forward or
backward pass, and idle while it waits for another rank. The formulas are those of GPipe (Huang et al. 2019),
interleaved stages (Narayanan et al. 2021) and zero bubbles (Qi et al. 2024), for passes of ideal duration, backward
twice as long as forward.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch.distributed.pipelining import PipelineStage

import wordrun
from wordrun import dist
from wordrun.backend.options import SCHEDULES, PPConfig
from wordrun.train.hooks.base import Hook, Training

STEPS, WARM_UP = 12, 3
SHAPES = shlex.split("""
    data=sample model=nano tracker=jsonl train.dtype=fp32 train.eval_interval=0 train.sample_tokens=0
    train.log_interval=1000000 model.n_layer=8 model.n_embd=256 model.block_size=128
    model.batch_size=8 backend.microbatches=8
""")
PASSES = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weights"}
COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#54a24b"}


@dataclass(frozen=True)
class Pass:
    """One stage's pass over one micro-batch."""

    rank: int
    stage: int
    kind: str
    begin: float
    end: float


class Recorder(Hook):
    """Records when the passes of each step begin and end on this rank; ranks on one machine share the clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: list[list[Pass]] = [[]]
        self.old = {name: getattr(PipelineStage, name) for name in PASSES}

    def at_start(self, trainer: Training) -> None:
        """Start timing the passes."""
        for name, kind in PASSES.items():
            setattr(PipelineStage, name, self._timed(self.old[name], kind))

    def after_step(self, trainer: Training) -> None:
        """Start the list of the next step."""
        self.steps.append([])
        td.barrier()  # else the next step's first stage would start in this one's bubble

    def close(self) -> None:
        """Stop timing the passes."""
        for name, method in self.old.items():
            setattr(PipelineStage, name, method)

    def _timed(self, method: Any, kind: str) -> Any:
        def timed(stage: PipelineStage, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = method(stage, *args, **kwargs)
            self.steps[-1].append(Pass(self.rank, stage.stage_index, kind, begin, time.perf_counter()))
            return result

        return timed


def idle_fraction(passes: list[Pass], ranks: int) -> float:
    """Return the fraction of the ranks' time, from the first pass to the last, for which they are idle."""
    span = max(each.end for each in passes) - min(each.begin for each in passes)
    return 1 - sum(each.end - each.begin for each in passes) / (ranks * span)


def formula(schedule: str, pp: int, runs: int, parts: int) -> float:
    """Return the ideal idle fraction of ``pp`` ranks with ``runs`` stages each and ``parts`` micro-batches.

    Interleaved zero bubble as ZB-H1: a third of 1F1B's bubble remains. ZB-V has none.
    """
    if schedule == "ZBVZeroBubble":
        return 0.0
    bubble = (pp - 1) / runs / (3 if schedule == "InterleavedZeroBubble" else 1)
    return bubble / (parts + bubble)


def record(world: dist.World, schedule: str, overrides: list[str], folder: str) -> tuple[list[Pass], float, int, int]:
    """Train under ``schedule``; return the median step's passes and idle fraction, stages per rank, micro-batches."""
    words = [*SHAPES, "train.backend=PP", f"backend.schedule={schedule}", f"train.max_iters={STEPS}", *overrides]
    cfg = wordrun.compose([*words, f"hydra.run.dir={folder}/{schedule}"], ranks=world.size)
    recorder = Recorder(world.rank)
    with wordrun.Trainer(cfg, world, hooks=[recorder]) as trainer:
        trainer.train()
        pp = trainer.layout.pp
    everyone: list[Any] = [None] * world.size
    td.all_gather_object(everyone, recorder.steps)
    steps = [[each for steps in everyone for each in steps[number]] for number in range(WARM_UP, STEPS)]
    steps.sort(key=lambda passes: idle_fraction(passes, world.size))
    assert isinstance(cfg.backend, PPConfig)
    fractions = [idle_fraction(passes, world.size) for passes in steps]
    parts = cfg.backend.microbatches_of(cfg.model.batch_size, pp)
    return steps[len(steps) // 2], statistics.median(fractions), cfg.backend.stages(pp) // pp, parts


def draw(found: dict[str, tuple[list[Pass], str]], ranks: int, path: Path) -> None:
    """Draw each schedule's passes, one row per rank."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.0 + len(found) * (0.5 + 0.45 * ranks)), layout="constrained")
    longest = max(max(p.end for p in passes) - min(p.begin for p in passes) for passes, _ in found.values())
    for axes, (schedule, (passes, title)) in zip(figure.subplots(len(found)), found.items(), strict=True):
        begin = min(each.begin for each in passes)
        for each in passes:
            axes.barh(
                each.rank,
                each.end - each.begin,
                left=each.begin - begin,
                height=0.8,
                color=COLOURS[each.kind],
                alpha=1.0 if each.stage < ranks else 0.6,
                edgecolor="white",
                linewidth=0.5,
            )
        axes.set_title(f"{schedule}: {title}", loc="left", fontsize=9)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.invert_yaxis()
        axes.set_xlim(0, longest)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds since the step's first pass (a rank's second run of blocks is paler)")
    labels = {"forward": "forward", "backward": "backward", "weights": "backward, weights alone"}
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=label) for kind, label in labels.items()],
        loc="outside upper right",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    """Record, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, default=Path("pipeline.png"), help="output file (default pipeline.png)")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES, help="default: all")
    args, overrides = parser.parse_known_args()
    with dist.session() as world, tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        found, rows = {}, []
        for schedule in args.schedules:
            passes, idle, runs, parts = record(world, schedule, overrides, dist.broadcast(folder, world))
            ideal = formula(schedule, world.size, runs, parts)
            found[schedule] = (passes, f"idle {idle:.0%}, formula {ideal:.0%}")
            rows.append(f"| {schedule} | {runs} | {parts} | {idle:.3f} | {ideal:.3f} |")
        if world.rank == 0:
            print(
                "| schedule | stages per rank | micro-batches | idle, measured | idle, formula |\n|---|---|---|---|---|"
            )
            print("\n".join(rows))
            draw(found, world.size, args.png)
            print(f"picture: {args.png}")


if __name__ == "__main__":
    main()
