"""Validation of a config: all impossible values and combinations, found together and before anything starts."""

from __future__ import annotations

import importlib.util
import math

from wordrun import ds_config
from wordrun.config import (
    BACKENDS,
    DTYPES,
    INTERLEAVED,
    SECTIONS,
    ZERO_BUBBLE,
    BackendConfig,
    Config,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    LlamaConfig,
    ModelConfig,
    PPConfig,
)
from wordrun.dist.mesh import AXES, Layout, resolve
from wordrun.errors import ConfigError
from wordrun.validation import one_of


def check(cfg: Config, ranks: int | None = None, per_node: int | None = None) -> Layout:
    """Return the layout of the ranks, or raise one ConfigError that names every problem of ``cfg``.

    Args:
        cfg: the composed config.
        ranks: number of ranks; None: not known yet, and what depends on it is not checked.
        per_node: ranks on each node, if not all are on one.
    """
    problems = [problem for section in SECTIONS for problem in getattr(cfg, section).problems()]
    problems += _check_backend(cfg)
    if not cfg.optimizer.decay_lr and cfg.schedule.name == "linear":
        problems.append("optimizer.decay_lr=false is schedule=constant, and not schedule=linear: leave it out")
    if ranks is None:
        if problems:
            raise ConfigError("\n".join(problems))
        return Layout()
    whole = Layout(replicate=ranks)
    try:
        whole = layout(cfg.backend, ranks, per_node or ranks)
        problems += _check_batch(cfg, whole.dp) or _check_static_graph(cfg, whole.dp)
    except ConfigError as error:
        problems += str(error).splitlines()
    if isinstance(cfg.backend, FSDPConfig) and not problems:  # else their numbers may mean nothing
        problems += [*_check_tensor(cfg.model, whole.tp), *_check_sharded(cfg, cfg.backend, whole)]
        if isinstance(cfg.backend, PPConfig):
            problems += _check_pipeline(cfg, cfg.backend, whole)
    if isinstance(cfg.backend, DeepSpeedConfig):
        problems += _check_deepspeed(cfg, cfg.backend, None if problems else ranks)
    if problems:
        raise ConfigError("\n".join(problems))
    return whole


def _check_backend(cfg: Config) -> list[str]:
    """Look for what ``train`` and ``backend`` say against each other."""
    train, problems = cfg.train, []
    if train.backend not in BACKENDS:
        problems += one_of("train.backend", train.backend, BACKENDS)
    elif train.backend != cfg.backend.name:
        problems.append(
            f"train.backend={train.backend}, but the options are those of backend={cfg.backend.name}: "
            f"choose by train.backend={cfg.backend.name} alone "
            "(in an experiment file: `- override /train.backend: NAME` in its defaults)"
        )
    if isinstance(cfg.backend, DeepSpeedConfig):
        if train.on_nonfinite == "skip":
            problems.append(
                "train.on_nonfinite=skip: DeepSpeed's engine takes every step by itself; use "
                "train.on_nonfinite=rollback"
            )
        if train.compile and cfg.backend.stage == 3:
            problems.append(
                "train.compile=true: compiled blocks cannot wait for the parameters that backend.stage=3 gathers: "
                "use train.compile=false, backend.stage=2, or train.backend=FSDP"
            )
    return problems


def layout(backend: BackendConfig, ranks: int, per_node: int) -> Layout:
    """Return how ``backend`` lays out ``ranks`` ranks, ``per_node`` to a node."""
    if not isinstance(backend, FSDPConfig):
        return Layout(replicate=ranks)
    return resolve(ranks, per_node, {axis: getattr(backend, axis) for axis in AXES if hasattr(backend, axis)})


def accumulation(cfg: Config, dp: int) -> int:
    """Return the micro-steps per optimizer step for ``dp`` data-parallel ranks."""
    if cfg.train.global_batch_size is None:
        return cfg.optimizer.gas or 1
    return cfg.train.global_batch_size // (cfg.model.batch_size * dp)


def stages(backend: PPConfig, pp: int) -> int:
    """Return the runs of blocks of the whole pipeline, with ``pp`` stages of ranks."""
    if backend.schedule == "ZBVZeroBubble":
        return 2 * pp  # each rank has one on the way in and one on the way back
    return pp * backend.stages_per_rank if backend.schedule in INTERLEAVED else pp


def microbatches(cfg: Config, backend: PPConfig, pp: int) -> int:
    """Return into how many parts a micro-step's sequences are cut for the pipeline."""
    return backend.microbatches or math.gcd(cfg.model.batch_size, pp)


def _check_batch(cfg: Config, dp: int) -> list[str]:
    whole, per_micro_step = cfg.train.global_batch_size, cfg.model.batch_size * dp
    if whole is None or per_micro_step < 1:
        return []
    if whole < 1 or whole % per_micro_step:
        fits = max(1, round(whole / per_micro_step)) * per_micro_step
        return [
            f"train.global_batch_size={whole} is not a multiple of model.batch_size={cfg.model.batch_size} "
            f"x {dp} data-parallel ranks = {per_micro_step}: use {fits}, or another model.batch_size"
        ]
    if cfg.optimizer.gas not in (None, whole // per_micro_step):
        return [
            f"train.global_batch_size={whole} needs {whole // per_micro_step} micro-steps of {per_micro_step} "
            f"sequences, but optimizer.gas={cfg.optimizer.gas}: leave one of the two out"
        ]
    return []


def _check_static_graph(cfg: Config, dp: int) -> list[str]:
    if not isinstance(cfg.backend, DDPConfig) or not cfg.backend.static_graph or cfg.model.batch_size < 1:
        return []
    gas = accumulation(cfg, dp)
    if gas == 1:
        return []
    return [
        f"backend.static_graph=true makes every backward pass send gradients, but a step has {gas} of them and "
        "only the last does: use backend.static_graph=false, or optimizer.gas=1 with a larger model.batch_size"
    ]


def _check_sharded(cfg: Config, backend: FSDPConfig, whole: Layout) -> list[str]:
    problems = []
    if backend.cpu_offload and whole.shard == 1:
        problems.append(
            "backend.cpu_offload=true moves shares to the host, and with backend.shard=1 there are none: "
            "use backend.shard=-1 backend.replicate=1, or backend.cpu_offload=false"
        )
    if whole.size == 1:
        problems.append(
            f"train.backend={cfg.train.backend} shares the model among ranks, and there is one: "
            "use launch -n 2, or train.backend=DDP"
        )
    if DTYPES[cfg.train.dtype] == "fp16":
        problems.append(
            f"train.dtype=fp16 needs a loss scaler that sharded gradients do not have: with train.backend="
            f"{cfg.train.backend} use train.dtype=bf16 or fp32"
        )
    return problems


def _check_tensor(model: ModelConfig, tp: int) -> list[str]:
    """Each rank of a tensor-parallel group has whole heads, and the same number of hidden units and tokens."""
    names = ["n_head", "n_embd", "block_size", "vocab_size"]
    if isinstance(model, LlamaConfig):
        names += ["n_kv_head", "n_hidden"]
    problems = []
    for name in names:
        size = getattr(model, name) or 0
        if size % tp:
            fits = math.lcm(size, tp) if name == "n_kv_head" else math.ceil(size / tp) * tp
            problems.append(
                f"model.{name}={size} is not divisible by backend.tp={tp}: "
                f"use model.{name}={fits}, or another backend.tp"
            )
    return problems


def _check_pipeline(cfg: Config, backend: PPConfig, whole: Layout) -> list[str]:
    problems = []
    count, parts = stages(backend, whole.pp), microbatches(cfg, backend, whole.pp)
    if count > cfg.model.n_layer:
        problems.append(
            f"a pipeline of {count} stages (backend.pp={whole.pp}, backend.schedule={backend.schedule}) needs as many "
            f"blocks, but model.n_layer={cfg.model.n_layer}: use a smaller backend.pp, or a deeper model"
        )
    if cfg.model.batch_size % parts:
        problems.append(
            f"backend.microbatches={parts} does not divide model.batch_size={cfg.model.batch_size}: "
            f"use {math.gcd(cfg.model.batch_size, parts)}, or another model.batch_size"
        )
    in_all = parts * accumulation(cfg, whole.dp)
    if backend.schedule != "GPipe" and in_all % whole.pp:
        problems.append(
            f"backend.schedule={backend.schedule} needs a multiple of backend.pp={whole.pp} micro-batches in a step, "
            f"not {in_all}: change model.batch_size, optimizer.gas or backend.microbatches, or use GPipe"
        )
    if backend.schedule in ZERO_BUBBLE:
        others = {"backend.shard": whole.shard, "backend.tp": whole.tp}
        problems += [
            f"backend.schedule={backend.schedule} splits the backward pass in two, which {key}={size} cannot: "
            f"use {key}=1, or backend.schedule=1F1B"
            for key, size in others.items()
            if size > 1
        ]
        if cfg.train.compile:
            problems.append(
                f"backend.schedule={backend.schedule} splits the backward pass in two, which compiled blocks cannot: "
                "use train.compile=false, or backend.schedule=1F1B"
            )
        if cfg.train.activation_checkpointing != "none":
            problems.append(
                f"backend.schedule={backend.schedule} splits the backward pass in two, which would compute "
                "checkpointed activations twice: use train.activation_checkpointing=none, or backend.schedule=1F1B"
            )
    return problems


def _check_deepspeed(cfg: Config, backend: DeepSpeedConfig, ranks: int | None) -> list[str]:
    """Look for the package, and for contradictions in a ds_config file, as far as ``ranks`` is known to be good."""
    problems = []
    if importlib.util.find_spec("deepspeed") is None:
        problems.append(
            "train.backend=deepspeed needs DeepSpeed, which is not installed: pip install 'wordrun[deepspeed]'"
        )
    try:
        ds_config.merge(cfg, backend, cfg.train.dtype, ranks, ranks and accumulation(cfg, ranks))
    except ConfigError as error:
        problems += str(error).splitlines()
    return problems
