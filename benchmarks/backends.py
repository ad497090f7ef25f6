"""Backends against plain loops in torch's own API, FSDP against DDP, and the plan's memory against the measured one.

    launch -n 2 python benchmarks/backends.py [speed memory measuring] [--rounds N]

Speed: both implementations take steps alternately, in the same processes and on the same batches; reports medians.
Memory: the peak of a step's allocations on rank 0 by torch's profiler, without parameters and optimizer state, against
the estimate of ``wordrun plan``.
Measuring: steps with the stopwatch and a line of metrics for every ten of them, against steps without.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as td
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import wordrun
from memory_peak import peak
from wordrun import dist
from wordrun.backend.fsdp import reduce_gradients
from wordrun.backend.sharded_tensors import full, local
from wordrun.backend.step_timer import StepTimer
from wordrun.dist.mesh import blocks_of
from wordrun.model.construction import materialize, meta_model
from wordrun.model.output_layer import cross_entropy
from wordrun.model.transformer import Transformer
from wordrun.plan.estimator import Estimator
from wordrun.plan.memory import memory
from wordrun.plan.options import PlanConfig, hardware
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.train.optim.adamw import adamw
from wordrun.train.optim.options import AdamWConfig

VOCABULARY = 50304
QUIET = [
    *shlex.split("data=sample model=nano tracker=jsonl train.dtype=fp32 train.device=cpu train.sample_tokens=0"),
    f"model.vocab_size={VOCABULARY}",
]
# GPT-2's width and vocabulary, with blocks and tokens limited to what two cores compute in seconds.
LARGE = ["model.n_layer=4", "model.n_head=12", "model.n_embd=768", "model.block_size=1024", "model.batch_size=4"]
SMALL = shlex.split("""
    model.n_layer=4 model.n_head=8 model.n_embd=512 model.block_size=256 model.batch_size=4
    model.vocab_size=4096
""")
STEPS = 10
"""Steps for each line of metrics, train.log_interval's default."""
Step = Callable[[], None]


def step_of(trainer: wordrun.Trainer) -> Step:
    """Return a step of the trainer's backend on its first batch."""
    batches = trainer._micro_batches()
    clock = StepTimer(trainer.backend.device)
    clock.start()

    def step() -> None:
        trainer.backend.train_step(batches, 1e-4, clock)

    return step


def bare(trainer: wordrun.Trainer) -> Step:
    """Return the same step as plain torch code, on a separate model."""
    name, cfg = trainer.cfg.train.backend, trainer.cfg
    (batch,) = trainer._micro_batches()
    ranks, rank = td.get_world_size(), td.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))

    def new(layers: Any = None) -> Transformer:
        return materialize(meta_model(cfg.transformer, VOCABULARY, layers), cfg.train.seed, "cpu")

    def finish(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        reduce_gradients(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        squares = torch.stack([local(grad).square().sum() for grad in grads]).sum()
        td.all_reduce(squares)
        factor = torch.clamp(cfg.optimizer.grad_clip / (squares.sqrt() + 1e-6), max=1.0)
        torch._foreach_mul_([local(grad) for grad in grads], factor)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if name == "PP":
        part = new(blocks_of(rank, ranks, cfg.transformer.n_layer))
        stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, lambda logits, targets: cross_entropy(logits, targets).mean())
        parameters = list(part.parameters())
        optimizer = adamw(AdamWConfig(), part.named_parameters())

        def pipeline() -> None:
            if rank == 0:
                schedule.step(batch.tokens)
                mine = part.tokens.weight.grad
            else:
                schedule.step(target=batch.targets)
                mine = part.head.weight.grad
            if part.tied:
                td.all_reduce(mine)
            finish(parameters, optimizer)

        return pipeline

    model = new()
    if name == "TP":
        parallelize_module(model, mesh, model.tensor_parallel_plan())
        model.tie()
    else:
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = adamw(AdamWConfig(), model.named_parameters())

    def step() -> None:
        with loss_parallel():
            torch.autograd.backward(full(model.losses(batch)).mean())
        finish(parameters, optimizer)

    return step


def in_turns(first: Step, second: Step, rounds: int) -> tuple[float, float]:
    """Return the median seconds of each step, after one warm-up step of each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for step, mine in zip((first, second), seconds, strict=True):
            td.barrier()
            begin = time.perf_counter()
            step()
            td.barrier()
            if number:
                mine.append(time.perf_counter() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def trainer_of(world: dist.World, folder: str, *overrides: str) -> wordrun.Trainer:
    """Return a trainer whose run directory is never created."""
    return wordrun.Trainer(wordrun.compose([*QUIET, *overrides, f"hydra.run.dir={folder}/run"]), world)


def speed(world: dist.World, folder: str, rounds: int) -> list[str]:
    """Return the rows of the table of speeds."""
    rows = []
    with (
        trainer_of(world, folder, *LARGE, "train.backend=FSDP") as fsdp,
        trainer_of(world, folder, *LARGE, "train.backend=DDP") as ddp,
    ):
        a, b = in_turns(step_of(fsdp), step_of(ddp), rounds)
        rows.append(f"| tokens/s, FSDP / DDP, GPT-2's width | {b / a:.3f} | at least 0.8 |")
    limits = {"FSDP": "at most +2 %", "TP": "at most +5 %", "PP": "at most +5 %"}
    for backend, limit in limits.items():
        with trainer_of(world, folder, *SMALL, f"train.backend={backend}") as trainer:
            a, b = in_turns(step_of(trainer), bare(trainer), 3 * rounds)
            rows.append(f"| {backend}, median step, over a bare loop's | {100 * (a / b - 1):+.1f} % | {limit} |")
    return rows


def memories(world: dist.World, folder: str) -> list[str]:
    """Return the rows of the table of memory."""
    rows = []
    for overrides in (["DDP"], ["FSDP"], ["FSDP", "backend.reshard_after_forward=false"], ["TP"], ["PP"]):
        backend, *more = overrides
        with trainer_of(world, folder, *SMALL, f"train.backend={backend}", *more) as trainer:
            step = step_of(trainer)
            step()  # allocates the optimizer's state,
            step()  # and this one DDP's last buckets
            measured = peak(step)
            model = shapes_of(trainer.cfg.transformer, VOCABULARY)
            options = PlanConfig(ranks=world.size, per_node=world.size, device="cpu")
            strategy = Estimator(trainer.cfg, model, hardware(options)).strategy(backend, trainer.cfg.backend)
            need = memory(model, strategy, "none", pp_rank=trainer.layout.index(world.rank, "pp"))
            planned = need.total - need.parameters - need.optimizer
            if backend == "DDP":  # its gradients are in buckets that are allocated all the time
                planned -= need.gradients
            rows.append(
                f"| {' '.join(overrides)} | {measured / 1e6:.0f} | {planned / 1e6:.0f} | {planned / measured:.2f} |"
            )
    return rows


class Silent(StepTimer):
    """Measures nothing."""

    def lap(self, label: str) -> None:
        """Do nothing."""

    def collective(self) -> Any:
        """Return a context that does nothing."""
        return contextlib.nullcontext()


def measuring(world: dist.World, folder: str, rounds: int) -> list[str]:
    """Return the rows of the table of what the metrics cost."""
    sent: list[int] = []
    gather = td.all_gather

    def counting(*args: Any, **options: Any) -> Any:
        sent.append(args[1].nbytes)
        return gather(*args, **options)

    with trainer_of(world, folder, *SMALL, "train.backend=DDP") as trainer:
        backend: Any = trainer.backend
        batches, meter, silent = trainer._micro_batches(), trainer.meter, Silent(backend.device)

        def ten_steps(*, measured: bool) -> None:
            backend.alone = not measured  # without the mark at the end of the gradients
            clock = meter.clock if measured else silent
            for _ in range(STEPS):
                clock.lap("hooks")
                clock.lap("data")
                result = backend.train_step(batches, 1e-4, clock)
                meter.add(result, 1e-4, trainer.examples_per_step)
            if measured:
                meter.line(trainer.state)

        def ten_steps_laps() -> None:
            meter.add(*meter._last, trainer.examples_per_step)
            for _ in range(STEPS):
                for label in ("hooks", "data", "forward", "backward", "communication", "communication", "optimizer"):
                    meter.clock.lap(label)
            meter.line(trainer.state)

        ten_steps(measured=True)  # leaves a result for lines of their own
        with_, without = in_turns(partial(ten_steps, measured=True), partial(ten_steps, measured=False), rounds)
        alone, nothing = in_turns(ten_steps_laps, lambda: None, 10 * rounds)
        td.all_gather = counting
        ten_steps_laps()
        td.all_gather = gather
    limit = "at most 1 %"
    return [
        f"| measuring, {1e3 * without / STEPS:.0f} ms per step | {100 * (with_ / without - 1):+.2f} % | {limit} |",
        f"| laps and lines alone, of 45 ms | {100 * (alone - nothing) / STEPS / 0.045:.2f} % | {limit} |",
        f"| bytes that a rank contributes to a line | {sum(sent)} | one all-gather, up to 64 ranks |",
    ]


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", default=["speed", "memory"], help="speed, memory (default: both), measuring"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind (default 5)")
    args = parser.parse_args()
    with dist.session(device="cpu") as world, tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        lines = []
        if "speed" in args.parts:
            lines += ["| figure | measured | target |", "|---|---|---|", *speed(world, folder, args.rounds)]
        if "measuring" in args.parts:
            lines += ["", "| figure | measured | target |", "|---|---|---|", *measuring(world, folder, args.rounds)]
        if "memory" in args.parts:
            head = ["", "| backend | peak of a step, rank 0 [MB] | plan [MB] | plan / measured |", "|---|---|---|---|"]
            lines += [*head, *memories(world, folder)]
        if world.rank == 0:
            print("\n".join(lines))


if __name__ == "__main__":
    main()
