"""The memory and the traffic of train.backend=diloco, for ``wordrun plan``."""

from __future__ import annotations

from dataclasses import replace

from wordrun.backend.diloco.options import DilocoConfig
from wordrun.plan.memory import Memory, memory_of_rank
from wordrun.plan.parameter_shapes import ModelShapes, numel
from wordrun.plan.strategy import FP32, Strategy, on_island
from wordrun.plan.traffic import Traffic, ring, traffic


@memory_of_rank.register(DilocoConfig)
def _memory(options: DilocoConfig, model: ModelShapes, strategy: Strategy, checkpointing: str, pp_rank: int) -> Memory:
    """Return the memory of the backend within an island, with the outer weights and their momentum, which are sharded
    and offloaded like the weights.
    """
    mine = on_island(strategy, options.inside())
    need = memory_of_rank(mine.backend, model, mine, checkpointing, pp_rank)
    copies = 2 if options.outer_momentum else 1
    outer = copies * FP32 * numel(model.stage(model.layers), shard=mine.layout.shards)
    if getattr(mine.backend, "cpu_offload", False) and not strategy.on_cpu:
        return replace(need, host=need.host + outer)
    return replace(need, optimizer=need.optimizer + outer)


@traffic.register(DilocoConfig)
def _traffic(options: DilocoConfig, model: ModelShapes, strategy: Strategy, pp_rank: int = 0) -> list[Traffic]:
    """Return the traffic within an island, and that of the exchange among islands, divided by the steps between two."""
    mine, islands = on_island(strategy, options.inside()), strategy.layout.islands
    total = 4 * numel(model.stage(model.layers), shard=mine.layout.shards)
    sent = ring(2, islands) * total / options.sync_every
    return [*traffic(mine.backend, model, mine, pp_rank), Traffic("all_reduce", islands, sent)]
