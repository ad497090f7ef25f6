"""The memory and the traffic of train.backend=deepspeed, for ``wordrun plan``."""

from __future__ import annotations

from wordrun.backend.deepspeed.options import DeepSpeedConfig
from wordrun.plan.activations import activation_memory
from wordrun.plan.memory import Memory, memory_of_rank, offload, optimizer_state
from wordrun.plan.parameter_shapes import ModelShapes, numel
from wordrun.plan.strategy import FP32, Strategy
from wordrun.plan.traffic import Traffic, ring, traffic

DEEPSPEED_BUCKET = 500_000_000
"""Number of elements that DeepSpeed gathers or reduces at once by default."""
DEEPSPEED_LIVE = 1_000_000_000
"""Default maximum number of gathered elements that ZeRO-3 keeps (stage3_max_live_parameters)."""


@memory_of_rank.register(DeepSpeedConfig)
def _memory(
    options: DeepSpeedConfig, model: ModelShapes, strategy: Strategy, checkpointing: str, pp_rank: int
) -> Memory:
    """ZeRO (sections 5 and 7.2), with DeepSpeed's 16-bit parameters and gradients; offload as in ZeRO-Offload."""
    count, ranks, size, stage = model.parameters, strategy.layout.dp, strategy.compute, options.stage
    # From stage 1 up, and at any stage in 16 bits, the optimizer updates an fp32 copy of the parameters.
    copy = FP32 if stage or size < FP32 else 0
    states = {
        "parameters": size * count / (ranks if stage == 3 else 1),
        "gradients": size * count / (ranks if stage >= 2 else 1),
        "optimizer": (copy * count + optimizer_state(strategy, model.stage(model.layers))) / (ranks if stage else 1),
    }
    offloaded = ["parameters"] * options.offload_params + ["gradients", "optimizer"] * options.offload_optimizer
    live = max(min(count, DEEPSPEED_LIVE), numel(model.block)) if stage == 3 else 0
    bucket = min(count, options.bucket_elements or DEEPSPEED_BUCKET)
    return Memory(
        **offload(states, offloaded, strategy),
        buffers=size * (live + bucket),
        at_loss=size * (live + bucket),
        **activation_memory(model, strategy, checkpointing, model.layers),
    )


@traffic.register(DeepSpeedConfig)
def _traffic(options: DeepSpeedConfig, model: ModelShapes, strategy: Strategy, pp_rank: int = 0) -> list[Traffic]:
    ranks, stage = strategy.layout.dp, options.stage
    total = strategy.compute * model.parameters
    sums = ring(1, ranks) * (strategy.gas if stage >= 2 else 1)
    gathers = ring(1, ranks) * (2 * strategy.gas if stage == 3 else 1)
    return [Traffic("reduce_scatter", ranks, total * sums), Traffic("all_gather", ranks, total * gathers)]
