"""Validation rules that involve several config sections or the number of ranks.

Rules about a single section are in its ``problems()``. All problems are reported together, before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from wordrun.backend.options import FSDPConfig, PPConfig
from wordrun.common.errors import ConfigError, PartError
from wordrun.common.validation import one_of
from wordrun.config import registry, schema
from wordrun.config.registry import KINDS, part_of
from wordrun.config.schema import Config
from wordrun.data.options import TextConfig
from wordrun.dist.mesh import Layout
from wordrun.model.options import ModelConfig, MoEConfig, TransformerConfig
from wordrun.train.options import DTYPES, accumulation

ALIGNED = 128
"""Accelerators multiply matrices faster if the vocabulary size is a multiple of this."""


def check(cfg: Config, ranks: int | None = None, per_node: int | None = None, *, runs_here: bool = True) -> Layout:
    """Return the layout of the ranks, or raise a ConfigError that names every problem in ``cfg``.

    Args:
        cfg: the composed config.
        ranks: number of ranks; None if unknown, which skips the checks that depend on it.
        per_node: ranks per node; None: all on one node.
        runs_here: whether the run is on this machine, which then must have the libraries that it needs.
    """
    problems = [*_ask(cfg, "problems"), *_of_any_layout(cfg), *_ask(cfg, "conflicts", cfg)]
    at = Layout()
    if ranks is not None:
        try:
            at = cfg.backend.layout(ranks, per_node or ranks)
            problems += check_batch(cfg, at.dp)
        except ConfigError as error:
            problems += str(error).splitlines()
        if not problems:  # the arithmetic below assumes valid options
            problems += _check_layout(cfg, at)
        complete = not problems or None
        if runs_here and (missing := cfg.backend.unavailable()):
            problems.append(missing)
        problems += cfg.backend.conflicts_on(cfg, complete and at, complete and accumulation(cfg, at.dp))
    if problems:
        raise ConfigError("\n".join(problems))
    return at


def _ask(cfg: Config, method: str, *arguments: Any) -> Iterator[str]:
    """Yield the messages of ``method`` of each part's options; an exception of a user's part becomes a message."""
    for section, options in schema.parts_in(cfg).items():
        try:
            yield from getattr(options, method)(*arguments)
        except Exception as error:
            kind = section.partition(".")[0]
            if kind not in KINDS or not (part := part_of(kind, options)).origin:
                raise
            yield str(PartError(f"{part}: {type(options).__name__}.{method} failed", error, type(options)))


def require_transformer(cfg: Config, why: str) -> TransformerConfig:
    """Return the model's options, if it is one of wordrun's transformers.

    Raises:
        ConfigError: it is another model; ``why`` follows its name.
    """
    if not isinstance(cfg.model, TransformerConfig):
        raise ConfigError(f"model={cfg.model.name}{why}")
    return cfg.model


def vocab_multiple(cfg: Config, tp: int, *, on_cpu: bool) -> int:
    """Return the number whose multiple the vocabulary is padded to; 1: no padding.

    Tensor parallelism divides the vocabulary by ``tp``, and accelerators prefer multiples of ``ALIGNED``. It is not
    padded if model.vocab_size sets it, nor for an engine whose checkpoints would contain the padding, nor in a model
    that is not a transformer of wordrun's.
    """
    model = cfg.model
    if not isinstance(model, TransformerConfig) or model.vocab_size is not None or not cfg.backend.pads_vocabulary:
        return 1
    return math.lcm(tp, 1 if on_cpu else ALIGNED)


def check_batch(cfg: Config, dp: int) -> Iterator[str]:
    """Yield what is wrong with the numbers of sequences in a step and a micro-step on ``dp`` data-parallel ranks."""
    batch, per_micro_step = cfg.train.global_batch_size, cfg.model.batch_size * dp
    if per_micro_step < 1:
        return
    if batch is not None and (batch < 1 or batch % per_micro_step):
        yield (
            f"train.global_batch_size={batch} is not a multiple of model.batch_size={cfg.model.batch_size} "
            f"x {dp} data-parallel ranks = {per_micro_step}: use {_fitting(cfg, batch, dp)}"
        )
        return
    yield from _check_ramp(cfg, dp)
    gas = accumulation(cfg, dp)
    if batch is not None and cfg.train.accumulation not in (None, gas):
        yield (
            f"train.global_batch_size={batch} needs {gas} micro-steps of {per_micro_step} "
            f"sequences, but train.accumulation={cfg.train.accumulation}: omit one of the two"
        )
    elif cfg.backend.one_micro_step and gas != 1:
        yield (
            f"backend.static_graph=true reduces gradients in every backward pass, but a step has {gas} of them and "
            "only the last may: use backend.static_graph=false, or train.accumulation=1 with a larger model.batch_size"
        )


def _fitting(cfg: Config, batch: int, dp: int) -> str:
    """Return the numbers of sequences nearest to ``batch`` that suit ``dp`` ranks, and a suitable model.batch_size."""
    per_micro_step = cfg.model.batch_size * dp
    below = max(0, batch) // per_micro_step * per_micro_step
    fits = " or ".join(str(size) for size in (below, below + per_micro_step) if size)
    # In a pipeline, a smaller batch changes the micro-batches, which have to suit the schedule.
    smaller = [] if cfg.backend.pipeline else [n for n in range(1, cfg.model.batch_size) if batch % (n * dp) == 0]
    return f"{fits}, or model.batch_size={smaller[-1]}" if smaller and batch > 0 else fits


def _check_ramp(cfg: Config, dp: int) -> Iterator[str]:
    """Check the batch sizes of train.batch_ramp for ``dp`` data-parallel ranks."""
    per_micro_step = cfg.model.batch_size * dp
    try:
        sizes = [size for _, size in cfg.train.ramp()]
    except ValueError:
        return  # reported with the options of the section
    for size in sizes:
        if size < 1 or size % per_micro_step:
            yield (
                f"train.batch_ramp=[{','.join(cfg.train.batch_ramp)}]: {size} sequences are not a multiple of "
                f"model.batch_size={cfg.model.batch_size} x {dp} data-parallel ranks = {per_micro_step}: "
                f"use {_fitting(cfg, size, dp)}"
            )
    if sizes and cfg.backend.fixed_accumulation:
        what = "a pipeline" if cfg.backend.pipeline else "an engine"
        yield (
            f"train.batch_ramp needs steps of different numbers of micro-steps, and train.backend={cfg.train.backend} "
            f"builds {what} for one number: use train.backend=FSDP, TP or DDP"
        )
    if sizes and cfg.backend.one_micro_step:
        yield "backend.static_graph=true does not allow the accumulation that train.batch_ramp needs: set it to false"


def _check_layout(cfg: Config, at: Layout) -> Iterator[str]:
    """Check the model and the batch against the layout of the ranks."""
    wanted = {"cp": at.cp > 1, "tp": at.tp > 1, "pp": cfg.backend.pipeline, "ep": at.ep > 1}
    missing = [axis for axis, is_wanted in wanted.items() if is_wanted and axis not in cfg.model.divides]
    for axis in missing:
        what = {
            "cp": "its sequences can be split across",
            "tp": "its matrices can be split across",
            "pp": "its layers can be split into stages for",
            "ep": "its experts can be split across",
        }[axis]
        yield (
            f"backend.{axis}={getattr(at, axis)} (train.backend={cfg.train.backend}): model={cfg.model.name} does not "
            f"declare how {what} ranks: use train.backend=DDP or "
            f"FSDP{', with backend.ep' * ('ep' in cfg.model.divides)}"
        )
    if cfg.lora_rank and (at.tp > 1 or at.pp > 1):
        yield (
            f"model.lora_rank={cfg.lora_rank}: adapters are not split across tensor-parallel ranks or pipeline "
            "stages: use train.backend=DDP, or FSDP if the model does not fit"
        )
    if isinstance(cfg.model, MoEConfig):
        yield from _check_experts(cfg, cfg.model, at)
    if isinstance(cfg.backend, FSDPConfig):
        yield from _check_tensor(cfg.model, at.tp)
        if at.cp > 1 and "cp" not in missing:
            yield from _check_context(cfg, cfg.backend, at)
    if isinstance(cfg.backend, PPConfig) and not missing:
        yield from _check_pipeline(cfg, cfg.backend, at)


def context_attention(backend: FSDPConfig, cfg: Config, at: Layout) -> str:
    """Return how context-parallel ranks compute attention: heads or gather."""
    if backend.cp_attention != "auto":
        return backend.cp_attention
    model, ranks = cfg.transformer, at.cp * at.tp
    return "heads" if model.n_head % ranks == 0 and model.key_heads() % ranks == 0 else "gather"


def _check_context(cfg: Config, backend: FSDPConfig, at: Layout) -> Iterator[str]:
    """Check that sequences and heads divide evenly over the context-parallel ranks."""
    model, kind = cfg.transformer, context_attention(backend, cfg, at)
    smaller = [n for n in range(at.cp - 1, 0, -1) if at.shards % n == 0]
    parts = math.lcm(2 * at.cp, at.cp * at.tp)
    if model.block_size % parts:
        fits = max(1, round(model.block_size / parts)) * parts
        tp = f" and backend.tp={at.tp}" if at.tp > 1 else ""
        other = next(n for n in smaller if n == 1 or model.block_size % math.lcm(2 * n, n * at.tp) == 0)
        yield (
            f"model.block_size={model.block_size} should be a multiple of {parts}: with backend.cp={at.cp}{tp}, each "
            f"rank has an early and a late chunk of every sequence; use model.block_size={fits}, or backend.cp={other}"
        )
    heads, ranks = math.gcd(model.n_head, model.key_heads()), at.cp * at.tp
    other = next(n for n in smaller if n == 1 or heads % (n * at.tp) == 0)
    if kind == "heads":
        if heads % ranks:
            name = "n_head" if model.n_head % ranks else "n_kv_head"
            yield (
                f"backend.cp_attention=heads divides model.{name}={getattr(model, name)} over backend.cp={at.cp} x "
                f"backend.tp={at.tp} = {ranks} ranks: use backend.cp_attention=gather, or backend.cp={other}"
            )
        return
    if model.dropout > 0:
        whole = "backend.cp_attention=heads"
        if heads % ranks:
            whole = f"backend.cp={other}" + f" {whole}" * (other > 1)
        yield (
            f"model.dropout={model.dropout:g} is not for backend.cp_attention=gather, which attends again in "
            f"the backward pass: use model.dropout=0, or {whole}"
        )


def _check_experts(cfg: Config, model: MoEConfig, at: Layout) -> Iterator[str]:
    """Check that experts divide evenly over the expert-parallel ranks, and what works with them."""
    if model.n_experts % at.ep:
        fits = " or ".join(str(n) for n in range(1, at.shards + 1) if at.shards % n == model.n_experts % n == 0)
        yield (
            f"model.n_experts={model.n_experts} is not divisible by backend.ep={at.ep}: use backend.ep={fits}, or "
            f"model.n_experts={math.ceil(model.n_experts / at.ep) * at.ep}"
        )
    if not cfg.backend.completes_steps:
        engine = f"{cfg.backend.engine}'s engine" if cfg.backend.engine else f"train.backend={cfg.train.backend}"
        yield (
            f"model={model.name}: {engine} does not balance the load of experts after a step: use train.backend=FSDP "
            "or DDP"
        )


def _check_tensor(model: ModelConfig, tp: int) -> Iterator[str]:
    """Check that heads, hidden units and tokens divide evenly over the ranks of a tensor-parallel group."""
    for name in model.tensor_parallel_options():
        size = getattr(model, name) or 0
        if size % tp:
            fits = math.lcm(size, tp) if name == "n_kv_head" else math.ceil(size / tp) * tp
            other = "omit it to have the vocabulary padded" if name == "vocab_size" else "another backend.tp"
            yield f"model.{name}={size} is not divisible by backend.tp={tp}: use model.{name}={fits}, or {other}"


def _check_pipeline(cfg: Config, backend: PPConfig, at: Layout) -> Iterator[str]:
    count, parts = backend.stages(at.pp), backend.microbatches_of(cfg.model.batch_size, at.pp)
    if count > cfg.transformer.n_layer:
        yield (
            f"a pipeline of {count} stages (backend.pp={at.pp}, backend.schedule={backend.schedule}) needs as many "
            f"blocks, but model.n_layer={cfg.transformer.n_layer}: use a smaller backend.pp, or a deeper model"
        )
    if cfg.model.batch_size % parts:
        yield (
            f"backend.microbatches={parts} does not divide model.batch_size={cfg.model.batch_size}: "
            f"use {math.gcd(cfg.model.batch_size, parts)}, or another model.batch_size"
        )
    total = parts * accumulation(cfg, at.dp)
    if backend.schedule != "GPipe" and total % at.pp:
        yield (
            f"backend.schedule={backend.schedule} needs a multiple of backend.pp={at.pp} micro-batches in a step, "
            f"not {total}: change model.batch_size, train.accumulation or backend.microbatches, or use GPipe"
        )
    if not backend.zero_bubble:
        return
    # Not supported by a split backward pass (input gradients before weight gradients).
    recomputes = cfg.train.activation_checkpointing != "none"
    for is_conflict, reason, remedy in (
        (at.shard > 1, f"backend.shard={at.shard} does not support", "backend.shard=1"),
        (at.cp > 1, f"backend.cp={at.cp} does not support", "backend.cp=1"),
        (at.tp > 1, f"backend.tp={at.tp} does not support", "backend.tp=1"),
        (cfg.train.compile is True, "compiled blocks do not support", "train.compile=false"),
        (cfg.train.activation_offload, "offloaded activations do not support", "train.activation_offload=false"),
        (recomputes, "would recompute checkpointed activations twice", "train.activation_checkpointing=none"),
    ):
        if is_conflict:
            yield (
                f"backend.schedule={backend.schedule} splits the backward pass in two, which {reason}: "
                f"use {remedy}, or backend.schedule=1F1B"
            )


def _of_any_layout(cfg: Config) -> Iterator[str]:
    """Yield the problems that do not depend on the number of ranks."""
    yield from _kinds(cfg)
    yield from _sections(cfg)
    yield from _several(cfg)
    yield from _check_float8(cfg)


def _kinds(cfg: Config) -> Iterator[str]:
    """Check that the kinds of text and tokenizer are registered."""
    yield from one_of("tokenizer.name", cfg.tokenizer.name, registry.parts("tokenizer"))
    if isinstance(cfg.data, TextConfig):
        kinds, kind = registry.parts("data"), cfg.data.kind
        yield from one_of("data.kind", kind, [*kinds, "mix"])
        if type(cfg.data) is TextConfig and kind in kinds and not kinds[kind].configures(cfg.data):
            yield f"data.kind={kind} has options of its own: select it by data={kind}"


def _several(cfg: Config) -> Iterator[str]:
    """Check the sections with several named parts; a config built in Python can use any names there."""
    if "jsonl" not in cfg.tracker:
        yield "tracker must include jsonl, which resuming a run requires: add it"
    for section in schema.SEVERAL:
        known = registry.parts(section)
        for name, options in getattr(cfg, section).items():
            yield from one_of(section, name, known)
            if name in known and not known[name].configures(options):
                wanted = known[name].options
                yield f"{section}.{name} has the options of {type(options).__name__}: use {wanted.__name__}"
    if cfg.metrics and cfg.backend.pipeline:
        names = ",".join(cfg.metrics)
        yield f"metrics=[{names}] needs the model's outputs, which a pipeline leaves on its last stage: use metrics=[]"


def _sections(cfg: Config) -> Iterator[str]:
    """Check for options that conflict with the choice made in another section."""
    train, backend = cfg.train, cfg.backend
    if cfg.model.task != cfg.data.task:
        options = [part.options for part in registry.parts("model").values() if not part.origin]
        use = " or ".join(f"model={each().name}" for each in options if each.task == cfg.data.task) or "a model for it"
        yield f"model={cfg.model.name} cannot train on data={cfg.data.name}: use {use}, or other data"
    if not cfg.optimizer.decay_lr and cfg.schedule.name == "linear":
        yield "optimizer.decay_lr=false means schedule=constant, not schedule=linear: remove it"
    if train.backend not in registry.backends():
        yield from one_of("train.backend", train.backend, registry.backends())
    elif train.backend != backend.name:
        yield (
            f"train.backend={train.backend} contradicts backend={backend.name}: select the backend with "
            f"train.backend={backend.name} alone "
            "(in an experiment file: `- override /train.backend: NAME` in its defaults)"
        )
    if cfg.lora_rank and not train.init_from:
        yield f"model.lora_rank={cfg.lora_rank} needs pretrained weights for its adapters: set train.init_from"
    if cfg.model.width_ratio() != 1 and cfg.optimizer.width_powers() is None:
        yield (
            f"model.mup=true needs learning rates that depend on the width, which optimizer={cfg.optimizer.name} does "
            "not state: add the method width_powers to its options, or use model.mup=false"
        )
    if train.deterministic and train.compile is True:
        yield (
            "train.deterministic=true does not cover torch.compile, which chooses kernels by timing them: "
            "use train.compile=false"
        )
    if train.compile_scope == "model" and not backend.one_module:
        yield (
            f"train.compile_scope=model: train.backend={train.backend} runs code between the blocks, so they are "
            "compiled one by one: use train.compile_scope=blocks, or train.backend=DDP"
        )


def _check_float8(cfg: Config) -> Iterator[str]:
    """Check the options that float8 linear layers need; the device is checked by the backend, which knows it."""
    float8 = f"train.float8={cfg.train.float8}"
    if cfg.train.float8 == "none":
        return
    if DTYPES.get(cfg.train.dtype) in ("fp32", "fp16"):
        yield f"{float8} casts from bf16, not from train.dtype={cfg.train.dtype}: use train.dtype=bf16"
    if not cfg.backend.whole_layers:
        yield (
            f"{float8} needs whole layers on each rank and one of wordrun's own engines, which "
            f"train.backend={cfg.train.backend} lacks: use train.backend=FSDP or DDP"
        )
    if "ep" in cfg.model.divides or cfg.lora_rank:
        what = "LoRA has" if cfg.lora_rank else "experts have"
        yield f"{float8} supports only linear layers, and {what} other matrix products: use train.float8=none"
