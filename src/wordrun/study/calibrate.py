"""``launch -n N python -m wordrun.study.calibrate FILE [overrides]``: how fast these ranks compute and communicate.

All ranks compute at the same time, each by itself: the passes of a model with one and with two of the blocks, and the
update of its weights; on CPUs also what tensor parallelism and sharding add on each rank. Rank 0 writes the slowest
rank's times to FILE.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from wordrun import bandwidth, dist
from wordrun.backend.precision import TORCH_DTYPES, fast_dtype
from wordrun.backend.split import parallelize
from wordrun.backend.tensors import full
from wordrun.checks import require_transformer
from wordrun.composer import compose
from wordrun.config import Config
from wordrun.data.batch import Batch
from wordrun.dist.collectives import all_max
from wordrun.dist.mesh import Layout
from wordrun.launch.job import count_cores
from wordrun.model import Transformer, materialize, meta_model
from wordrun.plan.cli import vocabulary
from wordrun.plan.time import Speeds
from wordrun.plan.traffic import TENSOR_ENDS, TENSOR_PASSES
from wordrun.registry import part_of

ROUNDS = 7
"""Measurements of each kind, of which the median counts."""
IN_A_ROW = 3
"""Repetitions within a measurement: after the first, ranks wait for each other and for cores as in training."""
TICK = 1e-12
"""Ranks compare times as integers of this unit [s]."""
SIZES = "64KB..16MB"
"""Messages to measure."""
PAIRS = 10
"""All-gathers and reduce-scatters in a measurement of those of tensor parallelism."""


def main(argv: Sequence[str]) -> int:
    """Measure, write the file, and return the exit status."""
    parser = argparse.ArgumentParser("wordrun.study.calibrate", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--no-bandwidth", action="store_true", help="do not measure how fast the ranks communicate")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args(argv)
    cfg = compose(args.overrides)
    require_transformer(cfg, ": the plan covers transformers only")
    with dist.session(device=cfg.train.device, seed=0) as world:
        speeds = measure(cfg, world, with_bandwidth=not args.no_bandwidth)
        if world.rank == 0:
            speeds.save(args.file)
    return 0


def measure(cfg: Config, world: dist.World, *, with_bandwidth: bool = True) -> Speeds:
    """Return the speeds of these ranks for the model of ``cfg``; every rank calls this."""
    ranks = RankTimer(cfg, world)
    groups = ranks.tensor_parallel_groups()
    slowest = all_max(torch.tensor([round(each / TICK) for each in ranks.times(groups)], device=ranks.device)) * TICK
    results = []
    if with_bandwidth and world.size > 1:
        axes = Layout(shard=world.size // groups[0], tp=groups[0]) if groups else None
        results = bandwidth.measure(world, bandwidth.sizes(SIZES), axes, lambda text: None)["results"]
    crowd = max(1.0, world.local_size / count_cores()[0]) if ranks.on_cpu else 1.0
    block_s, rest_s, update_s, block_pass_s, rest_pass_s, copy_s, *added = slowest.tolist()
    each_group = zip(groups, added[::2], added[1::2], strict=True)
    split = [{"ranks": tp, "block_s": block, "rest_s": rest} for tp, block, rest in each_group]
    return Speeds(
        block_s, rest_s, update_s, block_pass_s, rest_pass_s, split, copy_s, crowd, ranks.dtype, results
    )  # fmt: skip


class RankTimer:
    """Measures what each rank computes by itself, all ranks at the same time.

    Args:
        cfg: the config of a run.
        world: the ranks.
    """

    def __init__(self, cfg: Config, world: dist.World) -> None:
        self.cfg, self.world, self.device = cfg, world, torch.device(world.device)
        self.on_cpu = self.device.type == "cpu"
        self.dtype = fast_dtype(cfg.train.dtype, self.device)
        self.vocab_size, _ = vocabulary(cfg)

    def tensor_parallel_groups(self) -> list[int]:
        """Return the numbers of neighbors on a node, least first, that can divide the model; none on accelerators."""
        if not self.on_cpu or self.world.size == 1 or "tp" not in self.cfg.model.divides:
            return []
        cfg = self.cfg.transformer
        local = -int(all_max(torch.tensor(-self.world.local_size, device=self.device)))  # nodes may differ
        counts = [getattr(cfg, name) or 0 for name in cfg.tensor_parallel_options()]
        sizes = [n for n in range(2, local + 1) if self.world.size % n == local % n == 0]
        return [n for n in sizes if not any(count % n for count in counts)]

    def times(self, groups: Sequence[int]) -> list[float]:
        """Return the fields of ``Speeds`` that are times, then block and rest of each number of ranks in ``split``."""
        sequences, tokens = self.cfg.model.batch_size, self.cfg.transformer.block_size
        models = [self._model(layers) for layers in (1, 2)]
        most = block_and_rest(*self._seconds(*self._passes(models, sequences)))
        fixed = [0.0, 0.0]
        if sequences > 1:  # a line through the times of two sizes
            least = block_and_rest(*self._seconds(*self._passes(models, 1)))
            lines = [(sequences * few - many) / (sequences - 1) for few, many in zip(least, most, strict=True)]
            fixed = [min(max(0.0, line), few) for line, few in zip(lines, least, strict=True)]
        per_token = [max(0.0, many - part) / sequences / tokens for many, part in zip(most, fixed, strict=True)]
        copy = self._copy(models[0]) if self.on_cpu and self.world.size > 1 else 0.0
        split = [seconds for tp in groups for seconds in self._split(tp, models, sequences)]
        return [*per_token, self._update(models[0]), *fixed, copy, *split]

    def _model(self, layers: int, multiple: int = 1) -> Transformer:
        cfg = replace(self.cfg.transformer.one_block(), n_layer=layers)
        return materialize(meta_model(cfg, self.vocab_size, multiple=multiple), 0, self.device)

    def _split(self, tp: int, complete: Sequence[Transformer], sequences: int) -> list[float]:
        """Return what tensor parallelism adds to both passes of a block, and of the rest of the model [s].

        Groups of ``tp`` neighbors compute the model together, all groups at the same time. What that takes beyond
        their share of the complete model's time, and beyond the messages alone, is the work of each operation to find
        out how its tensors are divided, and the wait for the other ranks at each message. All are measured in the same
        turns, because it is a difference.

        Args:
            tp: ranks in a group.
            complete: models with one and with two blocks.
            sequences: in the batch.
        """
        cfg = self.cfg.transformer
        mesh = init_device_mesh(self.device.type, (self.world.size // tp, tp), mesh_dim_names=("others", "tp"))["tp"]
        models = [self._model(layers, tp) for layers in (1, 2)]
        for model in models:
            parallelize(model, mesh, model.tensor_parallel_plan())
            model.tie()
        message = sequences * cfg.block_size * cfg.n_embd * TORCH_DTYPES[self.dtype].itemsize
        ranks = tuple(td.get_process_group_ranks(mesh.get_group()))
        calls = bandwidth.operations(self.world, bandwidth.Group("axis tp", ranks, mesh.get_group()))
        both = [calls[name][0](message) for name in ("all_gather", "reduce_scatter")]
        passes = self._passes([*complete, *models], sequences)
        *times, seconds = self._seconds(*passes, lambda: [call() for call in both for _ in range(PAIRS)])
        undivided, divided = block_and_rest(*times[:2]), block_and_rest(*times[2:])
        pair = seconds / PAIRS
        sent = TENSOR_PASSES / 2 * pair, TENSOR_ENDS * pair
        return [max(0.0, now - alone / tp - each) for now, alone, each in zip(divided, undivided, sent, strict=True)]

    def _passes(self, models: Sequence[Transformer], sequences: int) -> list[Callable[[], None]]:
        """Return what takes both passes of each of ``models`` on a batch of ``sequences``."""
        shape = (sequences, self.cfg.transformer.block_size)
        random = torch.randint(self.vocab_size, shape, device=self.device)
        batch = Batch(random, random)

        def passes(model: Transformer) -> None:
            autocast = torch.autocast(self.device.type, dtype=TORCH_DTYPES[self.dtype], enabled=self.dtype != "fp32")
            with autocast, loss_parallel():  # which changes nothing unless the model is divided
                torch.autograd.backward(full(model.losses(batch)).mean())
            model.zero_grad()

        return [partial(passes, model) for model in models]

    def _update(self, model: Transformer) -> float:
        """Return the seconds per parameter of clipping and the optimizer."""
        make = part_of("optimizer", self.cfg.optimizer).build
        optimizer = make(self.cfg.optimizer, model.named_parameters())
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        (seconds,) = self._seconds(update)
        optimizer.zero_grad()
        return seconds / sum(each.numel() for each in parameters)

    def _copy(self, model: Transformer) -> float:
        """Return the seconds per byte to copy the parameters of a block into new memory."""
        size = sum(each.numel() for each in model.blocks.parameters())
        source = torch.ones(size, device=self.device)
        (seconds,) = self._seconds(source.clone)
        return seconds / source.nbytes

    def _seconds(self, *actions: Callable[[], Any]) -> list[float]:
        """Return how long each action takes, begun by all ranks together: medians, after one round to warm up.

        Actions are measured in turns, so that all are affected if the machine becomes slower meanwhile.
        """
        times: list[list[float]] = [[] for _ in actions]
        for _ in range(ROUNDS + 1):
            for action, found in zip(actions, times, strict=True):
                td.barrier()
                self._wait()
                begin = time.perf_counter()
                for _ in range(IN_A_ROW):
                    action()
                self._wait()
                found.append((time.perf_counter() - begin) / IN_A_ROW)
        return [statistics.median(found[1:]) for found in times]

    def _wait(self) -> None:
        if not self.on_cpu:
            torch.get_device_module(self.device).synchronize()


def block_and_rest(one: float, two: float) -> tuple[float, float]:
    """Return the seconds of a block and of the rest of a model, from those of it with one block and with two."""
    block = max(two - one, 0.1 * one)
    return block, max(one - block, 0.0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
