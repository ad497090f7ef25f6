"""How many bytes a rank needs, and sends, as arithmetic on the shapes of a model's parameters.

Sources: Rajbhandari et al. 2020 (ZeRO: which states a rank holds, and what it sends), Korthikanti et al. 2022
(activations, alone and under tensor and sequence parallelism), Narayanan et al. 2021 (the pipeline's bubble and the
micro-batches in flight), Qi et al. 2023 (zero-bubble schedules), and what torch's engines were seen to allocate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from wordrun.checks import accumulation, microbatches, stages
from wordrun.config import (
    INTERLEAVED,
    BackendConfig,
    Config,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    ModelConfig,
    PPConfig,
)
from wordrun.dist.mesh import Layout

if TYPE_CHECKING:
    from wordrun.model import Kept, Transformer

FP32 = 4
ADAMW = 8
"""Bytes of optimizer state per parameter: the means of the gradients and of their squares, in fp32."""
CROSS_ENTROPY = 12
"""Bytes per logit when its backward pass begins: the log-probabilities and two gradients of them, in fp32."""
DEEPSPEED_BUCKET = 500_000_000
"""Elements that DeepSpeed gathers or reduces at once, by default."""
DEEPSPEED_LIVE = 1_000_000_000
"""Elements of gathered parameters that ZeRO-3 keeps at most, by default (stage3_max_live_parameters)."""


@dataclass(frozen=True)
class Weights:
    """One parameter of the model."""

    shape: tuple[int, ...]
    split: int | None = None
    """Its dimension that a tensor-parallel group shares; None: each rank of the group has all of it."""
    product: bool = False
    """Whether it is a factor of a matrix product, so that autocast makes a copy of it in 16 bits."""

    def numel(self, tp: int = 1, shard: int = 1) -> int:
        """Return the elements of the largest share, on the first rank: torch cuts into runs of whole rows."""
        shape = list(self.shape)
        if self.split is not None:
            shape[self.split] = math.ceil(shape[self.split] / tp)
        shape[0] = math.ceil(shape[0] / shard)
        return math.prod(shape)


def numel(weights: Sequence[Weights], tp: int = 1, shard: int = 1) -> int:
    """Return the elements of a rank's shares of ``weights`` together."""
    return sum(each.numel(tp, shard) for each in weights)


@dataclass(frozen=True)
class Outline:
    """What the plan has to know of a model. All of its blocks are alike."""

    cfg: ModelConfig
    vocab_size: int
    first: list[Weights]
    """What the first part has besides blocks: the embedding."""
    block: list[Weights]
    last: list[Weights]
    """What the last part has besides blocks: the norm and the output layer."""
    shared: list[Weights]
    """What ``last`` need not have where ``first`` is in the same part: tied weights."""
    kept: list[Kept]
    """What a block keeps of each token for its backward pass, besides its input."""

    def outside(self, layers: Sequence[int]) -> list[Weights]:
        """Return the parameters outside the blocks of the part with the blocks ``layers``."""
        is_first, is_last = 0 in layers, self.cfg.n_layer - 1 in layers
        last = [each for each in self.last if not (is_first and each in self.shared)] if is_last else []
        return [*(self.first if is_first else []), *last]

    def weights(self, layers: Sequence[int]) -> list[Weights]:
        """Return the parameters of the part with the blocks ``layers``."""
        return self.outside(layers) + self.block * len(layers)

    @property
    def layers(self) -> range:
        """The numbers of all blocks."""
        return range(self.cfg.n_layer)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; shared ones count once."""
        return numel(self.weights(self.layers))


def read(cfg: ModelConfig, vocab_size: int, on_cpu: bool, *, bf16: bool = False) -> Outline:
    """Return what the plan has to know of the model that ``cfg`` describes.

    Args:
        cfg: shapes.
        vocab_size: rows of the embedding, where ``cfg`` does not say.
        on_cpu: on a CPU rather than an accelerator.
        bf16: computed in bf16.
    """
    from wordrun.model import meta_model

    whole = meta_model(replace(cfg, n_layer=1), vocab_size)
    shared = whole.tied and [_weights(whole, "head")[0]]
    first = [each for name in _outside(whole, is_first=True) for each in _weights(whole, name)]
    last = [each for name in _outside(whole, is_first=False) for each in _weights(whole, name)]
    block = _weights(whole, "blocks")
    return Outline(cfg, whole.vocab_size, first, block, last, shared or [], whole.kept_by_block(on_cpu, bf16))


def _outside(model: Transformer, *, is_first: bool) -> list[str]:
    names = [name for name, _ in model.named_children() if name != "blocks"]
    return [name for name in names if (name in ("norm", "head")) != is_first]


def _weights(model: Transformer, child: str) -> list[Weights]:
    """Return the parameters of a child of ``model``, and how its tensor-parallel plan shares them."""
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = model.tensor_parallel_plan()
    found = []
    for path, module in model.get_submodule(child).named_modules(prefix=child):
        styles = [style for pattern, style in plan.items() if fnmatch(path, pattern)]
        for name, parameter in module.named_parameters(recurse=False):
            split = None
            if any(isinstance(style, ColwiseParallel) for style in styles):
                split = 0
            elif any(isinstance(style, RowwiseParallel) for style in styles):
                split = 0 if isinstance(module, nn.Embedding) else 1 if name == "weight" else None
            found.append(Weights(tuple(parameter.shape), split, isinstance(module, nn.Linear)))
    return found


@dataclass(frozen=True)
class Way:
    """One way to train the model on the devices."""

    name: str
    cfg: Config
    """Its backend and batch; the precision is no longer auto."""
    layout: Layout
    words: tuple[str, ...] = ()
    """The overrides that choose it."""
    on_cpu: bool = False

    @property
    def backend(self) -> BackendConfig:
        """The options of its backend."""
        return self.cfg.backend

    @property
    def gas(self) -> int:
        """Micro-steps of a step."""
        return accumulation(self.cfg, self.layout.dp)

    @property
    def compute(self) -> int:
        """Bytes per element of a matrix product."""
        return FP32 if self.cfg.train.dtype == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream: autocast, where nothing is sharded, leaves it in fp32."""
        alone = isinstance(self.backend, FSDPConfig) and self.layout.dp == 1
        return FP32 if alone or isinstance(self.backend, DDPConfig) else self.compute


@dataclass(frozen=True)
class Memory:
    """What one rank needs, in bytes; of a pipeline the rank that needs most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """What forward passes keep until their backward passes."""
    logits: float
    """What the last norm and the cross entropy hold at their peak."""
    block: float
    """What the backward pass of one block adds to the activations, with what it computes again."""
    buffers: float
    """In the backward pass: copies of parameters, gathered or in 16 bits, gradients on their way, neighbours' data."""
    at_loss: float
    """What of the buffers there is while the loss is computed."""
    host: float
    """In the host's memory instead."""
    sent: float
    """Bytes that the rank sends per optimizer step."""
    late: bool = False
    """Whether gradients come as the activations go, rather than being there while there are most activations."""
    left: float = 0
    """Of the activations what there still is when all gradients have come late."""

    @property
    def total(self) -> float:
        """Bytes of the device at the peak: at the loss, in the first block's backward pass, or at the end."""
        most = self.activations + max(self.logits + self.at_loss, self.block + self.buffers)
        last = self.left + self.block + self.buffers + self.gradients
        rest = max(most, last) if self.late else most + self.gradients
        return self.parameters + self.optimizer + rest


def memory(model: Outline, way: Way, checkpointing: str, place: int | None = None) -> Memory:
    """Return what a rank of ``way`` needs with activation checkpointing ``checkpointing``.

    Args:
        model: the whole.
        way: how it is trained.
        checkpointing: as train.activation_checkpointing.
        place: of the rank in its pipeline; None: the place that needs most.
    """
    if isinstance(way.backend, PPConfig):
        places = range(way.layout.pp) if place is None else [place]
        every = [_pipeline(model, way, way.backend, checkpointing, rank) for rank in places]
        return max(every, key=lambda each: each.total)
    if isinstance(way.backend, FSDPConfig):
        return _sharded(model, way, way.backend, checkpointing)
    if isinstance(way.backend, DeepSpeedConfig):
        return _zero(model, way, way.backend, checkpointing)
    return _ddp(model, way, checkpointing)


def _ddp(model: Outline, way: Way, checkpointing: str) -> Memory:
    weights = model.weights(model.layers)
    count, options, ranks = numel(weights), way.backend, way.layout.dp
    assert isinstance(options, DDPConfig)
    buffers = 0.0
    if way.compute < FP32:  # autocast makes a copy of each factor and keeps it
        buffers += way.compute * numel([w for w in [*model.block * len(model.layers), *model.last] if w.product])
    if way.gas > 1 or ranks == 1 or not options.gradient_as_bucket_view:  # else gradients are the buckets
        buffers += FP32 * count
    return Memory(
        parameters=FP32 * count,
        gradients=FP32 * count,
        optimizer=ADAMW * count + FP32 * len(weights),  # and a count of steps for each
        buffers=buffers + FP32 * max(each.numel() for each in model.block),  # a gradient before it is added
        at_loss=buffers,
        host=0,
        sent=_ring(2, ranks) * (2 if options.compress == "bf16" else FP32) * count,
        **_alive(model, way, checkpointing, model.layers),
    )  # fmt: skip


def _zero(model: Outline, way: Way, options: DeepSpeedConfig, checkpointing: str) -> Memory:
    """ZeRO (sections 5 and 7.2), with DeepSpeed's parameters and gradients in 16 bits; offload as in ZeRO-Offload."""
    count, ranks, size, stage = model.parameters, way.layout.dp, way.compute, options.stage
    # From stage 1 on, and with 16 bits at any, the optimizer works on a copy of the parameters in fp32.
    copy = FP32 if stage or size < FP32 else 0
    states: dict[str, Any] = {
        "parameters": size * count / (ranks if stage == 3 else 1),
        "gradients": size * count / (ranks if stage >= 2 else 1),
        "optimizer": (copy + ADAMW) * count / (ranks if stage else 1),
    }
    away = [*(["parameters"] if options.offload_params else [])]
    away += ["gradients", "optimizer"] if options.offload_optimizer else []
    host = 0.0 if way.on_cpu else sum(states[name] for name in away)
    if not way.on_cpu:
        states |= dict.fromkeys(away, 0.0)
    live = max(min(count, DEEPSPEED_LIVE), numel(model.block)) if stage == 3 else 0
    bucket = min(count, options.bucket_elements or DEEPSPEED_BUCKET)
    sums = _ring(1, ranks) * (way.gas if stage >= 2 else 1)
    gathers = _ring(1, ranks) * (2 * way.gas if stage == 3 else 1)
    return Memory(
        **states,
        buffers=size * (live + bucket),
        at_loss=size * (live + bucket),
        host=host,
        sent=size * count * (sums + gathers),
        **_alive(model, way, checkpointing, model.layers),
    )


def _sharded(model: Outline, way: Way, options: FSDPConfig, checkpointing: str) -> Memory:
    """Fully sharded, one unit for each block and one for the rest."""
    at, whole = way.layout, options.reshard_after_forward
    root, block = numel(model.outside(model.layers), at.tp), numel(model.block, at.tp)
    blocks = len(model.layers)
    alone = at.shard == 1
    # The unit at work, those gathered ahead, and the buffer from which the newest is copied.
    units = min(blocks, 2 + options.prefetch) if whole else blocks
    gathered = _copy(way, alone) * (root + units * block)
    waiting = _copy(way, alone) * (root + (1 if whole else blocks) * block)
    if not whole and way.gas > 1 and not alone:  # gradients travel once a step, and are whole until then
        gathered += _reduced(way, options) * (root + blocks * block)
        waiting += _reduced(way, options) * (root + blocks * block)
    leaving = 0 if alone else way.compute * (root + block) + _reduced(way, options) * block
    rounds = way.gas if whole else 1
    sent = _states_sent(model, way, options, [model.layers], gathers=2 * way.gas if whole else way.gas, sums=rounds)
    return Memory(
        **_states(model, way, options, [model.layers]),
        buffers=gathered + leaving,
        at_loss=waiting,
        late=way.gas == 1 or not whole,
        sent=sent + _tensor_sent(model, way, [model.layers]),
        **_alive(model, way, checkpointing, model.layers),
    )


def _pipeline(model: Outline, way: Way, options: PPConfig, checkpointing: str, rank: int) -> Memory:
    """One rank of a pipeline; a step is one run through the schedule, with all of its micro-batches."""
    at, runs = way.layout, runs_of(model, way, options, rank)
    parts = microbatches(way.cfg, options, at.pp)
    count = parts * way.gas
    flying = in_flight(options.schedule, at.pp, rank, count, len(runs))
    alive = [_alive(model, way, checkpointing, run, parts) for run in runs]
    mean = {name: sum(each[name] for each in alive) / len(runs) for name in alive[0]}
    logits = max(each["logits"] for each in alive)
    if options.schedule == "GPipe":  # all losses are there before the first backward pass
        logits += logits * (FP32 + way.compute % FP32) / CROSS_ENTROPY * (count - 1)
    # torch keeps parameters and gradients whole from one micro-batch to the next, and a place for all that come in.
    local = sum(numel(model.weights(run), at.tp) for run in runs)
    message = _tokens(way) / parts * model.cfg.n_embd * way.compute / at.tp
    incoming = sum((0 not in run) + (model.cfg.n_layer - 1 not in run) for run in runs)
    alone = at.shard == 1
    buffers = (_copy(way, alone) + (0 if alone else _reduced(way, options))) * local + incoming * message * count
    sent = _states_sent(model, way, options, runs, gathers=1, sums=1) + incoming * message * count
    return Memory(
        **_states(model, way, options, runs),
        activations=mean["activations"] * flying,
        late=count * len(runs) <= flying,  # the last forward pass is before the first backward pass
        left=mean["activations"] * (flying - 1),
        logits=logits,
        block=mean["block"],
        buffers=buffers,
        at_loss=buffers,
        sent=sent + _tensor_sent(model, way, runs),
    )


def _states(model: Outline, way: Way, options: FSDPConfig, runs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return parameters, gradients and optimizer state of a rank, and what of it is in the host's memory."""
    weights = [each for run in runs for each in model.weights(run)]
    count = numel(weights, way.layout.tp, way.layout.shard)
    states = {
        "parameters": float(FP32 * count), "gradients": float(FP32 * count),
        "optimizer": float(ADAMW * count + FP32 * len(weights)),
    }  # fmt: skip
    if options.cpu_offload and not way.on_cpu:
        return dict.fromkeys(states, 0.0) | {"host": sum(states.values())}
    return states | {"host": 0.0}


def _copy(way: Way, alone: bool) -> int:
    """Return the bytes per element of gathered parameters: none where ``alone`` has them all, in their own type."""
    return 0 if alone and way.compute == FP32 else way.compute


def _reduced(way: Way, options: FSDPConfig) -> int:
    """Return the bytes per element in which gradients are averaged."""
    return 2 if options.reduce_dtype == "bf16" and way.compute < FP32 else FP32


def _states_sent(
    model: Outline, way: Way, options: FSDPConfig, runs: Sequence[Sequence[int]], *, gathers: int, sums: int
) -> float:
    """Return the bytes that gathering parameters and averaging gradients takes of a rank."""
    at, size = way.layout, _reduced(way, options)
    count = sum(numel(model.weights(run), at.tp) for run in runs)
    sharded = _ring(1, at.shard) * (way.compute * gathers + size * sums)
    return count * (sharded + _ring(2, at.replicate) * size / at.shard)


def _tensor_sent(model: Outline, way: Way, runs: Sequence[Sequence[int]]) -> float:
    """Return the bytes that tensor and sequence parallelism take of a rank.

    A block gathers its tokens twice and scatters its sums twice, and the backward pass does the reverse (Korthikanti
    et al. 2022, section 4.2.2); embedding and output layer take two each.
    """
    ends = sum((0 in run) + (model.cfg.n_layer - 1 in run) for run in runs)
    passes = 8 * sum(len(run) for run in runs) + 2 * ends
    return passes * _ring(1, way.layout.tp) * _tokens(way) * way.gas * model.cfg.n_embd * way.compute


def _alive(model: Outline, way: Way, checkpointing: str, layers: Sequence[int], parts: int = 1) -> dict[str, Any]:
    """Return the activations, logits and working memory of the part with the blocks ``layers``.

    Args:
        model: the whole.
        way: for the batch and the layout.
        checkpointing: as train.activation_checkpointing.
        layers: numbers of the blocks.
        parts: micro-batches into which a micro-step's sequences are cut.
    """
    cfg, tp, tokens = model.cfg, way.layout.tp, _tokens(way) / parts
    sizes = {"compute": way.compute, "stream": way.stream, "fp32": FP32, "byte": 1}
    autocast = way.stream != way.compute

    def size(kept: Kept) -> float:
        copies = max(1, kept.readers if autocast else 1)
        return kept.width * copies * sizes[kept.of] / (1 if kept.readers else tp)

    needed = sum(size(each) for each in model.kept if each.needed)
    products = sum(size(each) for each in model.kept if each.product)
    start = cfg.n_embd * way.stream / tp  # the block's input
    kept = {"none": needed + start, "selective": products + start, "full": start}
    others = sum(size(each) for each in model.kept if each.needed and not each.product)
    again = {"none": 0.0, "selective": others}.get(checkpointing, needed)
    if checkpointing.isdecimal():
        per_token = sum(kept["none" if layer % int(checkpointing) else "full"] for layer in layers)
        if layers[-1] % int(checkpointing):  # by the time that a block is computed again, the last one's are gone
            again = 0.0
    else:
        per_token = len(layers) * kept[checkpointing]
    head = 0.0
    if cfg.n_layer - 1 in layers:  # the last norm's input, its result, and the logits
        head = start + cfg.n_embd * way.compute + CROSS_ENTROPY * model.vocab_size / tp
    widest = max(size(each) for each in model.kept)
    return {
        "activations": tokens * per_token,
        "logits": tokens * head,
        # What is computed again, and gradients: of the stream, of the widest layer's result and of its input.
        "block": tokens * (again + start + 2 * widest),
    }


def _tokens(way: Way) -> int:
    """Return the tokens of a micro-step on a rank."""
    return way.cfg.model.batch_size * way.cfg.model.block_size


def _ring(passes: int, ranks: int) -> float:
    """Return what share of its data a rank sends in so many passes around a ring."""
    return passes * (ranks - 1) / ranks


# Pipelines


def runs_of(model: Outline, way: Way, options: PPConfig, place: int) -> list[range]:
    """Return the runs of blocks that the rank at ``place`` of the pipeline has."""
    from wordrun.backend.pipeline import blocks_of, owner_of

    pp, count = way.layout.pp, stages(options, way.layout.pp)
    mine = [stage for stage in range(count) if owner_of(stage, pp, options.schedule) == place]
    return [blocks_of(stage, count, model.cfg.n_layer) for stage in mine]


def in_flight(schedule: str, pp: int, rank: int, parts: int, runs: int) -> int:
    """Return how many forward passes of a rank wait for the end of their backward passes at most.

    Args:
        schedule: by name.
        pp: ranks of the pipeline.
        rank: number of the rank in it.
        parts: micro-batches of a step.
        runs: runs of blocks that a rank has; each micro-batch passes each of them.
    """
    if schedule == "GPipe":
        return parts
    if schedule == "1F1B":
        return min(parts, pp - rank)
    if schedule == "Interleaved1F1B":
        return min(parts * runs, (runs - 1) * pp + 2 * (pp - 1 - rank) + 1)
    return min(parts * runs, runs * pp)  # the zero-bubble schedules put gradients of weights off


def bubble(way: Way) -> float:
    """Return the share of a step in which a rank of the pipeline waits.

    (p - 1) / (v m + p - 1) for p ranks, m micro-batches and v runs of blocks on a rank (Narayanan et al. 2021, section
    2.2). A zero-bubble schedule fills two thirds of it, ZBV all, where the forward pass and the gradients of inputs and
    of weights take equally long (Qi et al. 2023).
    """
    options, pp = way.backend, way.layout.pp
    if not isinstance(options, PPConfig) or options.schedule == "ZBVZeroBubble":
        return 0.0
    idle = (pp - 1) / (3 if options.schedule == "InterleavedZeroBubble" else 1)
    runs = options.stages_per_rank if options.schedule in INTERLEAVED else 1
    return idle / (runs * microbatches(way.cfg, options, pp) * way.gas + idle)
