"""Pipeline schedules: the blocks of each rank, micro-batches in flight, and the bubble."""

from __future__ import annotations

from wordrun.backend.options import INTERLEAVED, PPConfig
from wordrun.dist.mesh import blocks_of, owner_of
from wordrun.plan.strategy import Strategy


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
