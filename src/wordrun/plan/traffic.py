"""Bytes that a rank sends per optimizer step.

Sources: Rajbhandari et al. 2020, section 7 (ZeRO), and Korthikanti et al. 2022, section 4.2.2 (tensor and sequence
parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence

from wordrun.config import FSDPConfig
from wordrun.plan.shapes import ModelShapes, numel
from wordrun.plan.strategy import FP32, Strategy


def ring(passes: int, ranks: int) -> float:
    """Return the fraction of its data that a rank sends in ``passes`` passes around a ring."""
    return passes * (ranks - 1) / ranks


def reduce_size(strategy: Strategy, options: FSDPConfig) -> int:
    """Return the bytes per element in which gradients are averaged."""
    return 2 if options.reduce_dtype == "bf16" and strategy.compute < FP32 else FP32


def sharding_traffic(
    model: ModelShapes, strategy: Strategy, options: FSDPConfig, stages: Sequence[Sequence[int]],
    *, gathers: int, sums: int,
) -> float:  # fmt: skip
    """Return the bytes sent to gather parameters ``gathers`` times and to average gradients ``sums`` times."""
    at, size = strategy.layout, reduce_size(strategy, options)
    count = sum(numel(model.stage(layers), at.tp) for layers in stages)
    sharded = ring(1, at.shard) * (strategy.compute * gathers + size * sums)
    return count * (sharded + ring(2, at.replicate) * size / at.shard)


def tensor_traffic(model: ModelShapes, strategy: Strategy, stages: Sequence[Sequence[int]]) -> float:
    """Return the bytes sent for tensor and sequence parallelism.

    A block gathers its tokens twice and scatters its sums twice, and the backward pass does the reverse; embedding and
    output layer add two passes each.
    """
    ends = sum((0 in layers) + (model.cfg.n_layer - 1 in layers) for layers in stages)
    passes = 8 * sum(len(layers) for layers in stages) + 2 * ends
    size = strategy.tokens * strategy.gas * model.cfg.n_embd * strategy.compute
    return passes * ring(1, strategy.layout.tp) * size
