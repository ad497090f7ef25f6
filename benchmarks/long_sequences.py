"""Long sequences on several ranks: the memory of a block, the longest sequence that fits, and the cost.

    python benchmarks/long_sequences.py                                 # the longest sequence that fits, by layout
    launch -n 4 python benchmarks/long_sequences.py --part block        # peak of a block on 4 ranks against one
    launch -n 4 python benchmarks/long_sequences.py --part step         # peak of a step on 4 ranks against the plan
    launch -n 4 python benchmarks/long_sequences.py --part cost         # time of a block at the same tokens per rank

All at GPT-2's shapes. All but ``step`` print a table in Markdown for benchmarks/results; a test compares the first one,
from which docs/backends.md has its figures. ``block`` and ``step`` measure by how much the
memory of a process grows, in fp32 on CPUs, with weights and their gradients already there; other programs on the
machine do not change that. ``cost`` needs a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from wordrun import compose
from wordrun.common.errors import ConfigError
from wordrun.config import rules
from wordrun.config.schema import Config
from wordrun.plan.memory import memory
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.plan.strategy import Strategy

GOAL = 0.35
"""Most of one rank's memory that a block may need on each of four ranks."""
VOCAB = 50257
RESERVE = 0.1
"""Fraction of a device that stays free, as in ``wordrun plan``."""
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""
KEPT = ("none", "selective", "full")
"""Values of train.activation_checkpointing."""
KINDS = ("heads", "gather")
LAYOUTS: dict[str, Callable[[int], list[str]]] = {
    "DDP": lambda n: ["train.backend=DDP"],
    "FSDP": lambda n: ["train.backend=FSDP"],
    "TP": lambda n: ["train.backend=TP", f"backend.tp={n}"],
    "FSDP with `backend.cp`": lambda n: ["train.backend=FSDP", f"backend.cp={n}"],
}


def gpt2(tokens: int, *words: str) -> Config:
    """Return the config of GPT-2 with sequences of ``tokens``, one per micro-step."""
    return compose(
        [
            "data=sample",
            "model=gpt2",
            f"model.block_size={tokens}",
            "model.batch_size=1",
            "model.dropout=0",
            "tracker=jsonl",
            *words,
        ]
    )


def table(gib: float, step: int = 1024) -> list[list[str]]:
    """Return the longest sequences, multiples of ``step`` tokens, with which each rank fits into ``gib`` GiB."""
    counts, room = (1, 2, 4), gib * (1 - RESERVE) * 2**30
    rows = [["backend", "`train.activation_checkpointing=`", "one rank", *(f"{n} ranks" for n in counts[1:])]]
    for name, words_of in LAYOUTS.items():
        found = [longest(words_of(n), n, room, step) for n in counts]
        for kind in KEPT:
            rows.append([name, kind, *(f"{each[kind]:,}" if each else "-" for each in found)])
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Return the table of ``rows``, the first of which is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def longest(words: list[str], ranks: int, room: float, step: int) -> dict[str, int]:
    """Return the longest sequence that fits on ``ranks`` accelerators in bf16, by what is kept; {}: no such layout."""
    try:
        cfg = gpt2(step, *words, "train.dtype=bf16")
        at = rules.check(cfg, ranks)
    except ConfigError:
        return {}

    def fits(count: int, kind: str) -> bool:
        longer = replace(cfg, model=replace(cfg.transformer, block_size=count * step))
        model = shapes_of(longer.model, VOCAB)
        return memory(model, Strategy("", longer, at), kind).total <= room

    most = range(1, 2**12)  # as many steps are more than any layout has room for
    return {kind: step * bisect_left(most, 1, key=lambda count: not fits(count, kind)) for kind in KEPT}


def block(args: argparse.Namespace, world: Any) -> None:
    """Print the peak of one block's passes over ``args.tokens``, on one rank and on all."""
    block_passes(256, None)()  # a process's first passes allocate more
    alone = peak_of(block_passes(args.tokens, None)) if world.rank == 0 else 0
    rows = [["`backend.cp_attention=`", f"on each of {world.size} ranks", "on one rank", "ratio"]]
    for kind in KINDS:
        block_passes(256, kind)()
        most = all_most(peak_of(block_passes(args.tokens, kind)))
        if world.rank == 0:
            rows.append([kind, f"{most / 2**20:,.0f} MiB", f"{alone / 2**20:,.0f} MiB", f"{most / alone:.2f}"])
    if world.rank == 0:
        print(f"A block over {args.tokens:,} tokens; the goal on 4 ranks is {GOAL}.\n\n{markdown(rows)}", flush=True)


def block_passes(tokens: int, kind: str | None) -> Callable[[], None]:
    """Return what runs a block forward and backward on this rank's part of ``tokens``; without ``kind``, on all."""
    import torch
    import torch.distributed as td

    from wordrun import model as models
    from wordrun.model.context_parallel import Context

    cfg = gpt2(tokens, "model.n_layer=1")
    built = models.build(cfg.transformer, VOCAB)
    layer: Any = next(iter(built.blocks.children()))
    context = Context(td.group.WORLD, kind) if kind else None
    x = torch.randn(1, tokens // (context.size if context else 1), cfg.transformer.n_embd)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        inputs = x.clone().requires_grad_()
        outputs = layer(inputs, context=context) if context else layer(inputs)
        outputs.backward(torch.ones_like(outputs))

    return run


def step(args: argparse.Namespace, world: Any) -> None:
    """Print the peak of an optimizer step with cp over all ranks, beside the plan's."""
    import torch

    from wordrun import backend
    from wordrun.backend.step_timer import StepTimer
    from wordrun.config.registry import part_of
    from wordrun.data.batch import Batch
    from wordrun.model.construction import meta_model

    divided = LAYOUTS["FSDP with `backend.cp`"](world.size)
    words = [*divided, f"model.n_layer={args.layers}", "train.dtype=fp32", "train.device=cpu"]
    cfg = gpt2(args.tokens, *words)
    at = rules.check(cfg, world.size)
    optimizer = partial(part_of("optimizer", cfg.optimizer).build, cfg.optimizer)
    spec = backend.BackendSpec(cfg, world, at, partial(meta_model, cfg.transformer, VOCAB), optimizer)
    made = backend.build(spec)
    tokens = torch.randint(VOCAB, (1, args.tokens + 1), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens[:, :-1], tokens[:, 1:])]
    made.train_step(batches, 1e-4, StepTimer(made.device))  # allocates the optimizer's state
    most = all_most(peak_of(lambda: made.train_step(batches, 1e-4, StepTimer(made.device))))
    made.close()
    if world.rank == 0:
        need = memory(shapes_of(cfg.model, VOCAB), Strategy("", cfg, at, on_cpu=True), "none")
        planned = need.total - need.parameters - need.optimizer
        print(
            f"a step of {args.layers} layers at {args.tokens:,} tokens on {world.size} ranks: {most / 2**20:.0f} MiB "
            f"measured beside weights and optimizer state, {planned / 2**20:.0f} planned: {most / planned:.2f}",
            flush=True,
        )


def cost(args: argparse.Namespace, world: Any) -> None:
    """Print the time of a block's passes on all ranks, and of one rank with as many tokens as each of these has."""
    import torch.distributed as td

    part, alone = args.tokens // world.size, 0.0
    if world.rank == 0:
        alone = seconds(block_passes(part, None))
    td.barrier()
    on_all, on_one = f"{args.tokens:,} tokens on {world.size} ranks", f"{part:,} tokens on one rank"
    rows = [["`backend.cp_attention=`", on_all, on_one, "ratio"]]
    for kind in KINDS:
        taken = seconds(block_passes(args.tokens, kind))
        if world.rank == 0:
            rows.append([kind, f"{taken:.2f} s", f"{alone:.2f} s", f"{taken / alone:.2f}"])
    if world.rank == 0:
        print(markdown(rows), flush=True)


def seconds(passes: Callable[[], None], repeats: int = 3) -> float:
    """Return the median time of ``passes``."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        passes()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def peak_of(passes: Callable[[], Any]) -> int:
    """Return by how many bytes this process's memory grows at most during ``passes``, on Linux.

    torch's profiler would not see what the threads of gloo free.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_peak()
    passes()
    return resident_peak() - before


def resident_peak() -> int:
    """Return the most bytes that this process has had in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def all_most(size: int) -> int:
    """Return the largest ``size`` of all ranks."""
    import torch
    import torch.distributed as td

    most = torch.tensor(size)
    td.all_reduce(most, td.ReduceOp.MAX)
    return int(most)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("table", "block", "step", "cost"), default="table")
    parser.add_argument("--tokens", type=int, default=16384, help="length of a sequence")
    parser.add_argument("--layers", type=int, default=4, help="of the model in --part step")
    parser.add_argument("--gib", type=float, default=24, help="memory of a device, for the table")
    args = parser.parse_args()
    if args.part == "table":
        print(markdown(table(args.gib)))
        return
    from wordrun import dist

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # so that freed memory is returned at once
    with dist.session(device="cpu", hang_s=0) as world:
        {"block": block, "step": step, "cost": cost}[args.part](args, world)


if __name__ == "__main__":
    main()
