"""The traffic of a rank in an optimizer step: bytes sent, by operation and size of the group.

To plan another backend, register a function for its config: ``traffic.register(MyConfig)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

from wordrun.backend.options import BackendConfig, DDPConfig, FSDPConfig, PPConfig
from wordrun.config.rules import context_attention
from wordrun.model.options import MoEConfig
from wordrun.plan.parameter_shapes import ModelShapes, numel
from wordrun.plan.pipeline import stages_of
from wordrun.plan.strategy import FP32, Strategy, registered

Stages = Sequence[Sequence[int]]
"""The block indices in each pipeline stage of a rank."""
TENSOR_PASSES = 8
"""Messages of tensor parallelism in both passes of a block: as many all-gathers as reduce-scatters."""
TENSOR_ENDS = 2
"""Such messages of the embedding, and of the output layer."""


@dataclass(frozen=True)
class Traffic:
    """The messages of one operation in an optimizer step."""

    operation: str
    """As ``test_dist --bench`` names it."""
    ranks: int
    """Ranks in the group."""
    sent: float
    """Bytes that each rank sends."""


@singledispatch
def traffic(options: BackendConfig, model: ModelShapes, strategy: Strategy, pp_rank: int = 0) -> list[Traffic]:
    """Return what a rank sends under the backend in ``options``; ``pp_rank`` is its index in the pipeline.

    Raises:
        NoEstimateError: the plan does not cover this backend.
    """
    registered(traffic, options)
    return traffic(options, model, strategy, pp_rank)


@traffic.register(DDPConfig)
def _ddp(options: DDPConfig, model: ModelShapes, strategy: Strategy, pp_rank: int = 0) -> list[Traffic]:
    ranks, size = strategy.layout.dp, 2 if options.compress == "bf16" else FP32
    return [Traffic("all_reduce", ranks, ring(2, ranks) * size * numel(model.stage(model.layers)))]


@traffic.register(FSDPConfig)
def _fsdp(options: FSDPConfig, model: ModelShapes, strategy: Strategy, pp_rank: int = 0) -> list[Traffic]:
    gas, reshard = strategy.gas, options.reshard_after_forward
    gathers, sums = (2 * gas, gas) if reshard else (gas, 1)
    stages = [model.layers]
    return [
        *_sharding(model, strategy, options, stages, gathers, sums),
        *_tensor(model, strategy, stages),
        *context_traffic(model, strategy, stages),
        *_experts(model, strategy),
    ]


@traffic.register(PPConfig)
def _pipeline(options: PPConfig, model: ModelShapes, strategy: Strategy, pp_rank: int = 0) -> list[Traffic]:
    stages = stages_of(strategy, options, pp_rank)
    incoming, message = messages(options, model, strategy, stages)
    return [
        *_sharding(model, strategy, options, stages, 1, 1),
        Traffic("point_to_point", strategy.layout.pp, incoming * message),
        *_tensor(model, strategy, stages),
        *context_traffic(model, strategy, stages),
    ]


def messages(options: PPConfig, model: ModelShapes, strategy: Strategy, stages: Stages) -> tuple[int, float]:
    """Return the number of messages that a pipeline's rank receives in a step (it sends as many), and their size."""
    parts = options.microbatches_of(strategy.cfg.model.batch_size, strategy.layout.pp)
    message = strategy.tokens / parts * model.cfg.n_embd * strategy.compute / strategy.layout.tp
    ends = sum((0 not in layers) + (model.cfg.n_layer - 1 not in layers) for layers in stages)
    return ends * parts * strategy.gas, message


def ring(passes: int, ranks: int) -> float:
    """Return the fraction of its data that each rank sends in ``passes`` passes around a ring."""
    return passes * (ranks - 1) / ranks


def reduce_size(strategy: Strategy, options: FSDPConfig) -> int:
    """Return the bytes per element for averaging gradients."""
    return 2 if options.reduce_dtype == "bf16" and strategy.compute < FP32 else FP32


def _sharding(
    model: ModelShapes, strategy: Strategy, options: FSDPConfig, stages: Stages, gathers: int, sums: int
) -> list[Traffic]:
    """Return what is sent to gather parameters ``gathers`` times and to average gradients ``sums`` times."""
    at, size = strategy.layout, reduce_size(strategy, options)
    count = sum(numel(model.stage(layers), at.tp, ep=at.ep) for layers in stages)
    once = count * ring(1, at.shards)
    if at.ep > 1:  # experts are gathered by fewer ranks
        experts = sum(len(layers) for layers in stages) * numel([p for p in model.block if p.expert], ep=at.ep)
        once -= experts * (ring(1, at.shards) - ring(1, at.expert_shard))
    return [
        Traffic("all_gather", at.shards, once * strategy.compute * gathers),
        Traffic("reduce_scatter", at.shards, once * size * sums),
        Traffic("all_reduce", at.replicate, count * ring(2, at.replicate) * size / at.shards),
    ]


def _tensor(model: ModelShapes, strategy: Strategy, stages: Stages) -> list[Traffic]:
    """Return what is sent for tensor and sequence parallelism.

    Each block gathers its tokens twice and scatters its sums twice, and the backward pass does the reverse; the
    embedding and the output layer add two passes each.
    """
    tp = strategy.layout.tp
    ends = sum((0 in layers) + (model.cfg.n_layer - 1 in layers) for layers in stages)
    passes = TENSOR_PASSES * sum(len(layers) for layers in stages) + TENSOR_ENDS * ends
    size = strategy.tokens * model.cfg.n_embd * strategy.compute
    half = passes / 2 * ring(1, tp) * size * strategy.gas
    return [Traffic("all_gather", tp, half), Traffic("reduce_scatter", tp, half)]


def _experts(model: ModelShapes, strategy: Strategy) -> list[Traffic]:
    """Return what is sent to bring tokens to their experts and back, in both passes, if all experts get equally many.

    A token is sent separately to each of its experts.
    """
    at, cfg = strategy.layout, model.cfg
    if at.ep == 1 or not isinstance(cfg, MoEConfig):
        return []
    size = strategy.tokens * cfg.n_active * cfg.n_embd * strategy.compute
    return [Traffic("all_to_all", at.ep, 4 * strategy.gas * cfg.n_layer * ring(1, at.ep) * size)]


def context_traffic(model: ModelShapes, strategy: Strategy, stages: Stages | None = None) -> list[Traffic]:
    """Return what is sent so that tokens attend to those of other context-parallel ranks; ``stages`` None: all blocks.

    With heads, queries, keys, values and results are exchanged, and in the backward pass their gradients. Otherwise
    keys and values reach all ranks in both passes, and their gradients return in fp32.
    """
    at, cfg = strategy.layout, model.cfg
    if at.cp == 1 or not isinstance(strategy.backend, FSDPConfig):
        return []
    width = cfg.attention_width() / at.tp
    keys = 2 * width * cfg.key_heads() / cfg.n_head
    calls = strategy.gas * sum(len(layers) for layers in ([model.layers] if stages is None else stages))
    kind = context_attention(strategy.backend, strategy.cfg, at)
    if kind == "heads":
        both = strategy.tokens * (2 * width + keys) * strategy.compute
        return [Traffic("all_to_all", at.cp, 2 * calls * ring(1, at.cp) * both)]
    part = strategy.tokens * keys
    sent, returned = 2 * (at.cp - 1) * part * strategy.compute, (at.cp - 1) * part * FP32
    return [Traffic("all_gather", at.cp, calls * sent), Traffic("reduce_scatter", at.cp, calls * returned)]
