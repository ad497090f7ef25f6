"""Time of a step with each optimizer beside AdamW's, in turns, in the same processes and on the same batches.

    launch -n 2 python benchmarks/optimizer.py [--optimizers muon ...] [--rounds N] [-- OVERRIDE ...]

Without overrides: the model of experiment=shakespeare (6 layers, 384 features), 12 sequences of 256 tokens per rank.
Prints medians over the rounds: the step, the part of it that the optimizer takes (with clipping), and the ratio of the
steps to AdamW's in the same round.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import tempfile
import time

import wordrun
from wordrun import dist
from wordrun.backend.step_timer import StepTimer

MODEL = shlex.split("""
    data=sample model=nano tracker=jsonl train.dtype=fp32 train.sample_tokens=0 train.checkpoint_interval=0
    model.n_layer=6 model.n_head=6 model.n_embd=384 model.block_size=256 model.batch_size=12
""")


def main() -> None:
    """Print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["muon"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    names = ["adamw", *args.optimizers]
    with dist.session() as world, tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for name in names:
            words = [*MODEL, *args.overrides, f"optimizer={name}", f"hydra.run.dir={folder}/{name}"]
            cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
            trainers[name] = wordrun.Trainer(cfg, world)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for number in range(args.rounds + 2):  # two to warm up
            for name, trainer in trainers.items():
                batches, clock = trainer._micro_batches(), StepTimer(trainer.backend.device)
                dist.broadcast(None, world)
                begin = time.perf_counter()
                clock.start()
                trainer.backend.train_step(batches, 1e-4, clock)
                optimizer = clock.read()["optimizer"]
                dist.broadcast(None, world)
                if number > 1:
                    seconds[name].append((time.perf_counter() - begin, optimizer))
        for trainer in trainers.values():
            trainer.backend.close()
        if world.rank == 0:
            print(f"{'':10}{'ms/step':>10}{'optimizer':>12}{'x AdamW':>10}")
            for name, each in seconds.items():
                step, optimizer = (statistics.median(column) for column in zip(*each, strict=True))
                ratio = statistics.median(mine[0] / base[0] for mine, base in zip(each, seconds["adamw"], strict=True))
                print(f"{name:10}{1000 * step:10.1f}{1000 * optimizer:12.1f}{ratio:10.2f}", flush=True)


if __name__ == "__main__":
    main()
