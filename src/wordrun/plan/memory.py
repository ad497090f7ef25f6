"""Memory in bytes that a rank needs under each backend, computed from the shapes of the model's parameters.

Sources: Rajbhandari et al. 2020 (ZeRO: the states a rank holds and sends), Korthikanti et al. 2022 (activations,
traffic of tensor and sequence parallelism), Narayanan et al. 2021 and Qi et al. 2023 (pipelines), and observed
allocations of torch's engines.

To plan another backend, register a function for its config: ``memory_of_rank.register(MyConfig)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

from wordrun.backend.options import BackendConfig, DDPConfig, FSDPConfig, PPConfig
from wordrun.config.rules import vocab_multiple
from wordrun.plan.activations import activation_memory, kept_logits
from wordrun.plan.parameter_shapes import ModelShapes, NoEstimateError, ParameterShape, numel, shapes_of
from wordrun.plan.pipeline import in_flight, stages_of
from wordrun.plan.strategy import FP32, Strategy, registered
from wordrun.plan.traffic import Stages, messages, reduce_size, traffic


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Saved by forward passes for the backward passes."""
    logits: float
    """Peak during the last norm and the cross entropy."""
    block: float
    """Added to the activations by the backward pass of one block, including recomputed tensors."""
    buffers: float
    """In the backward pass: gathered parameters, 16-bit copies, gradients in transit, data of neighboring stages."""
    at_loss: float
    """The part of the buffers that exists while the loss is computed."""
    sent: float = 0.0
    """Bytes sent per optimizer step; added by ``memory``."""
    host: float = 0.0
    """Offloaded to host memory."""
    late: bool = False
    """Whether gradients are allocated while activations are freed, rather than before."""
    left: float = 0
    """With ``late``: the activations left once all gradients are allocated."""

    @property
    def total(self) -> float:
        """Peak device memory: at the loss, in the first block's backward pass, or at the end."""
        most = self.activations + max(self.logits + self.at_loss, self.block + self.buffers)
        last = self.left + self.block + self.buffers + self.gradients
        rest = max(most, last) if self.late else most + self.gradients
        return self.parameters + self.optimizer + rest


def memory(model: ModelShapes, strategy: Strategy, checkpointing: str, pp_rank: int | None = None) -> Memory:
    """Return the memory of a rank under ``strategy``.

    Args:
        model: the complete model, without padding.
        strategy: the training strategy.
        checkpointing: a value of train.activation_checkpointing.
        pp_rank: index of the rank in its pipeline; None: the rank that needs most.

    Raises:
        NoEstimateError: if the plan does not cover this backend or model.
    """
    multiple = vocab_multiple(strategy.cfg, strategy.layout.tp, on_cpu=strategy.on_cpu)
    if model.vocab_size % multiple:
        model = shapes_of(model.cfg, model.vocab_size, multiple)
    ranks = range(strategy.layout.pp) if pp_rank is None else [pp_rank]
    all_ = model.stage(model.layers)
    share = numel([each for each in all_ if each.trained]) / numel(all_)  # less than 1 with LoRA

    def of(rank: int) -> Memory:
        need, sent = memory_of_rank(strategy.backend, model, strategy, checkpointing, rank), 0.0
        with contextlib.suppress(NoEstimateError):  # a user's backend
            sent = sum(each.sent for each in traffic(strategy.backend, model, strategy, rank))
        need = replace(need, gradients=need.gradients * share, optimizer=need.optimizer * share, sent=sent or need.sent)
        return _without_activations(need, strategy) if strategy.cfg.train.activation_offload else need

    return max(map(of, ranks), key=lambda need: need.total)


def _without_activations(need: Memory, strategy: Strategy) -> Memory:
    """Return ``need`` with the activations of all blocks but one in host memory."""
    kept = need.activations * strategy.layout.pp / strategy.cfg.transformer.n_layer
    if strategy.on_cpu or kept >= need.activations:
        return need
    return replace(need, activations=kept, left=min(need.left, kept), host=need.host + need.activations - kept)


@singledispatch
def memory_of_rank(
    options: BackendConfig, model: ModelShapes, strategy: Strategy, checkpointing: str, pp_rank: int
) -> Memory:
    """Return the memory of one rank under the backend in ``options``; for the other arguments see ``memory``."""
    registered(memory_of_rank, options)
    return memory_of_rank(options, model, strategy, checkpointing, pp_rank)


@memory_of_rank.register(DDPConfig)
def _ddp(options: DDPConfig, model: ModelShapes, strategy: Strategy, checkpointing: str, pp_rank: int) -> Memory:
    shapes = model.stage(model.layers)
    count, ranks = numel(shapes), strategy.layout.dp
    buffers = 0.0
    if strategy.compute < FP32:  # autocast keeps a copy of each matrix product's factors
        factors = [each for each in [*model.block * len(model.layers), *model.last] if each.matmul]
        if checkpointing != "none":  # those of experts are saved for the backward pass instead
            experts = [each for each in model.block if each.expert]
            factors = [*experts, *(each for each in factors if not each.expert)]
        buffers += strategy.compute * numel(factors)
    # Else gradients are views of the buckets. One process has no buckets.
    separate = strategy.gas > 1 or not options.gradient_as_bucket_view
    if ranks > 1 and separate:
        buffers += FP32 * count
    size, state = FP32 * count, optimizer_state(strategy, shapes)
    return Memory(
        parameters=size,
        gradients=size,
        optimizer=state,
        at_loss=buffers,
        buffers=buffers + FP32 * max(each.numel() for each in model.block),  # a new gradient before accumulation
        **activation_memory(model, strategy, checkpointing, model.layers),
    )


def optimizer_state(
    strategy: Strategy, shapes: Sequence[ParameterShape], tp: int = 1, shard: int = 1, ep: int = 1
) -> float:
    """Return the bytes of fp32 optimizer state, and of hooks.ema, for a rank's shards of parameters of ``shapes``."""
    optimizer = strategy.cfg.optimizer
    need = FP32 * numel(shapes, tp, shard, ep) if "ema" in strategy.cfg.hooks else 0
    for hidden in (False, True):
        values, some = optimizer.state_values(hidden=hidden), [each for each in shapes if each.hidden == hidden]
        if values is None:
            raise NoEstimateError(f"no estimate for optimizer={optimizer.name}")
        need += FP32 * (values[0] * numel(some, tp, shard, ep) + values[1] * len(some))
    return need


@memory_of_rank.register(FSDPConfig)
def _fsdp(options: FSDPConfig, model: ModelShapes, strategy: Strategy, checkpointing: str, pp_rank: int) -> Memory:
    """Fully sharded, with one unit per block and one for the rest."""
    at, gas, reshard = strategy.layout, strategy.gas, options.reshard_after_forward
    root, block = numel(model.outside_blocks(model.layers), at.tp), numel(model.block, at.tp, ep=at.ep)
    blocks = len(model.layers)
    # The current unit, the prefetched ones, and the buffer the newest one is copied from.
    gathered = _gathered_size(strategy) * (root + (min(blocks, 2 + options.prefetch) if reshard else blocks) * block)
    at_loss = _gathered_size(strategy) * (root + (1 if reshard else blocks) * block)
    unsharded = at.shards == 1
    if not reshard and gas > 1 and not unsharded:  # gradients stay unsharded until averaged once per step
        gradients = reduce_size(strategy, options) * (root + blocks * block)
        gathered, at_loss = gathered + gradients, at_loss + gradients
    in_transit = 0 if unsharded else strategy.compute * (root + block) + reduce_size(strategy, options) * block
    return Memory(
        **_sharded_states(model, strategy, options, [model.layers]),
        buffers=gathered + in_transit,
        at_loss=at_loss,
        late=gas == 1 or not reshard,
        **activation_memory(model, strategy, checkpointing, model.layers),
    )


@memory_of_rank.register(PPConfig)
def _pipeline(options: PPConfig, model: ModelShapes, strategy: Strategy, checkpointing: str, pp_rank: int) -> Memory:
    """One rank of a pipeline; a step runs the schedule once over all micro-batches."""
    at, stages = strategy.layout, stages_of(strategy, options, pp_rank)
    parts = options.microbatches_of(strategy.cfg.model.batch_size, at.pp)
    count = parts * strategy.gas
    flying = in_flight(options.schedule, at.pp, pp_rank, count, len(stages))
    each = [activation_memory(model, strategy, checkpointing, layers, parts) for layers in stages]
    mean = {name: sum(stage[name] for stage in each) / len(stages) for name in each[0]}
    logits = max(stage["logits"] for stage in each)
    if options.schedule == "GPipe" and logits:  # all losses exist before the first backward pass
        logits += kept_logits(model, strategy, strategy.tokens / parts) * (count - 1)
    # torch keeps unsharded parameters and gradients between micro-batches, and a buffer for every incoming message.
    local = sum(numel(model.stage(layers), at.tp) for layers in stages)
    incoming, message = messages(options, model, strategy, stages)
    averaged = 0 if at.shards == 1 else reduce_size(strategy, options)
    buffers = (_gathered_size(strategy) + averaged) * local + incoming * message
    return Memory(
        **_sharded_states(model, strategy, options, stages),
        activations=mean["activations"] * flying,
        late=count * len(stages) <= flying,  # the last forward pass precedes the first backward pass
        left=mean["activations"] * (flying - 1),
        logits=logits,
        block=mean["block"],
        buffers=buffers,
        at_loss=buffers,
    )


def _gathered_size(strategy: Strategy) -> int:
    """Return the bytes per element of gathered parameters; 0 if all are local and already have the right type."""
    return 0 if strategy.layout.shards == 1 and strategy.compute == FP32 else strategy.compute


def _sharded_states(model: ModelShapes, strategy: Strategy, options: FSDPConfig, stages: Stages) -> dict[str, Any]:
    """Return the bytes of a rank's parameters, gradients and optimizer state, and how much is in host memory."""
    shapes = [each for layers in stages for each in model.stage(layers)]
    at = strategy.layout
    size = float(FP32 * numel(shapes, at.tp, at.shards, at.ep))
    optimizer = optimizer_state(strategy, shapes, at.tp, at.shards, at.ep)
    states = {"parameters": size, "gradients": size, "optimizer": optimizer}
    return offload(states, states if options.cpu_offload else (), strategy)


def offload(states: dict[str, float], names: Iterable[str], strategy: Strategy) -> dict[str, Any]:
    """Return ``states`` with ``names`` moved to host memory; on CPUs all memory is host memory."""
    moved = {} if strategy.on_cpu else {name: states[name] for name in names}
    return states | dict.fromkeys(moved, 0.0) | {"host": sum(moved.values())}
