"""A strategy for training the model on the devices, and its pipeline arithmetic."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wordrun.backend.options import INTERLEAVED, BackendConfig, PPConfig
from wordrun.config.schema import Config
from wordrun.dist.mesh import Layout, blocks_of, owner_of
from wordrun.plan.parameter_shapes import NoEstimateError
from wordrun.train.options import accumulation

FP32 = 4


@dataclass(frozen=True)
class Strategy:
    """A way to train the model on the devices."""

    name: str
    cfg: Config
    """The config with the strategy's backend and batch size, and auto precision resolved."""
    layout: Layout
    overrides: tuple[str, ...] = ()
    """The command-line overrides that select it."""
    on_cpu: bool = False

    @property
    def backend(self) -> BackendConfig:
        """The backend options."""
        return self.cfg.backend

    @property
    def gas(self) -> int:
        """Micro-steps per optimizer step."""
        return accumulation(self.cfg, self.layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens per micro-step and rank."""
        return self.cfg.model.batch_size * self.cfg.transformer.block_size // self.layout.cp

    @property
    def compute(self) -> int:
        """Bytes per element in matrix products."""
        return FP32 if self.cfg.train.dtype == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream: autocast in fp16, without sharding, leaves it in fp32."""
        if self.cfg.train.dtype != "fp16":
            return self.compute
        unsharded = self.backend.sharded and self.layout.dp * self.layout.cp == 1
        return FP32 if unsharded or self.backend.replicated else self.compute


def on_island(strategy: Strategy, inside: BackendConfig) -> Strategy:
    """Return how each island of ``strategy`` trains, with the backend ``inside``."""
    cfg = strategy.cfg
    train, optimizer = replace(cfg.train, global_batch_size=None), replace(cfg.optimizer, gas=strategy.gas)
    mine = replace(cfg, backend=inside, train=train, optimizer=optimizer)
    return replace(strategy, cfg=mine, layout=strategy.layout.of_island)


def stages_of(strategy: Strategy, options: PPConfig, rank: int) -> list[range]:
    """Return the blocks of each pipeline stage on rank ``rank`` of the pipeline."""
    pp, n_layer = strategy.layout.pp, strategy.cfg.transformer.n_layer
    count = options.stages(pp)
    mine = [stage for stage in range(count) if owner_of(stage, pp, options.schedule) == rank]
    return [blocks_of(stage, count, n_layer) for stage in mine]


def in_flight(schedule: str, pp: int, rank: int, parts: int, stages_per_rank: int) -> int:
    """Return the maximum number of forward passes on a rank still waiting for their backward passes.

    Args:
        schedule: name of the schedule.
        pp: ranks in the pipeline.
        rank: index of the rank in the pipeline.
        parts: micro-batches per step.
        stages_per_rank: number of stages on each rank; every micro-batch passes through all of them.
    """
    if schedule == "GPipe":
        return parts
    if schedule == "1F1B":
        return min(parts, pp - rank)
    if schedule == "Interleaved1F1B":
        return min(parts * stages_per_rank, (stages_per_rank - 1) * pp + 2 * (pp - 1 - rank) + 1)
    return min(parts * stages_per_rank, stages_per_rank * pp)  # zero-bubble schedules postpone weight gradients


def bubble(strategy: Strategy) -> float:
    """Return the fraction of a step that a pipeline rank is idle.

    (p - 1) / (v m + p - 1) for p ranks, m micro-batches and v stages per rank (Narayanan et al. 2021, section 2.2).
    Zero-bubble schedules fill two thirds of it and ZBV all of it, if the forward pass, input gradients and weight
    gradients take equally long (Qi et al. 2023).
    """
    options, pp = strategy.backend, strategy.layout.pp
    if not isinstance(options, PPConfig) or options.schedule == "ZBVZeroBubble":
        return 0.0
    idle = (pp - 1) / (3 if options.schedule == "InterleavedZeroBubble" else 1)
    stages_per_rank = options.stages_per_rank if options.schedule in INTERLEAVED else 1
    return idle / (stages_per_rank * options.microbatches_of(strategy.cfg.model.batch_size, pp) * strategy.gas + idle)


def registered(estimate: Callable[..., Any], options: BackendConfig) -> None:
    """Have the module of ``options`` register its function for ``estimate``, a ``functools.singledispatch``.

    Raises:
        NoEstimateError: the plan does not cover this backend.
    """
    dispatch = estimate.dispatch  # type: ignore[attr-defined]
    if options.estimates:
        importlib.import_module(options.estimates)
    if dispatch(type(options)) is dispatch(object):
        raise NoEstimateError(f"no estimate for train.backend={options.name}")
