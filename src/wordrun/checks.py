"""Validation rules that concern several sections of a config, or the number of ranks.

Rules about one section alone are its ``problems()``. All problems are found together, before anything starts.
"""

from __future__ import annotations

import importlib.util
import math

from wordrun import ds_config
from wordrun.config import (
    BACKENDS,
    DTYPES,
    INTERLEAVED,
    PARTS,
    SEVERAL,
    BackendConfig,
    Config,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    ModelConfig,
    PPConfig,
    parts_in,
)
from wordrun.dist.mesh import Layout, resolve
from wordrun.errors import ConfigError
from wordrun.validation import one_of


def check(cfg: Config, ranks: int | None = None, per_node: int | None = None) -> Layout:
    """Return the layout of the ranks, or raise one ConfigError that names every problem of ``cfg``.

    Args:
        cfg: the composed config.
        ranks: number of ranks; None: unknown, and what depends on it is not checked.
        per_node: ranks per node; None: all are on one.
    """
    problems = [problem for part in parts_in(cfg).values() for problem in part.problems()]
    problems += _check_choice(cfg) + _check_several(cfg)
    if not cfg.optimizer.decay_lr and cfg.schedule.name == "linear":
        problems.append("optimizer.decay_lr=false means schedule=constant, not schedule=linear: remove it")
    at = Layout()
    if ranks is not None:
        try:
            at = layout(cfg.backend, ranks, per_node or ranks)
            problems += _check_batch(cfg, at.dp) or _check_static_graph(cfg, at.dp)
        except ConfigError as error:
            problems += str(error).splitlines()
        if not problems:  # else the arithmetic below may be meaningless
            problems += _check_layout(cfg, at)
        if isinstance(cfg.backend, DeepSpeedConfig):
            problems += _check_deepspeed(cfg, cfg.backend, None if problems else ranks)
    if problems:
        raise ConfigError("\n".join(problems))
    return at


def _check_several(cfg: Config) -> list[str]:
    """Check the sections that can have several parts; a config made in Python can have any names there."""
    problems = [] if "jsonl" in cfg.tracker else ["tracker lacks jsonl, from which a run is resumed: add it"]
    for section in SEVERAL:
        for name, options in getattr(cfg, section).items():
            if name not in PARTS[section]:
                problems += one_of(section, name, PARTS[section])
            elif type(options) is not PARTS[section][name].options:
                wanted = PARTS[section][name].options.__name__
                problems.append(f"{section}.{name} has the options of {type(options).__name__}: use {wanted}")
    if "early_stop" in cfg.hooks and not cfg.train.eval_interval:
        problems.append("hooks=early_stop needs evaluations, but train.eval_interval=0")
    return problems


def _check_choice(cfg: Config) -> list[str]:
    """Compare ``train`` with the backend that it chooses."""
    train, problems = cfg.train, []
    if train.backend not in BACKENDS:
        problems += one_of("train.backend", train.backend, BACKENDS)
    elif train.backend != cfg.backend.name:
        problems.append(
            f"train.backend={train.backend} contradicts backend={cfg.backend.name}: choose a backend with "
            f"train.backend={cfg.backend.name} alone "
            "(in an experiment file: `- override /train.backend: NAME` in its defaults)"
        )
    if isinstance(cfg.backend, DeepSpeedConfig):
        if train.on_nonfinite == "skip":
            problems.append(
                "train.on_nonfinite=skip is impossible with DeepSpeed, whose engine takes every step: "
                "use train.on_nonfinite=rollback"
            )
        if train.compile and cfg.backend.stage == 3:
            problems.append(
                "train.compile=true: compiled blocks cannot wait for the parameters that backend.stage=3 gathers: "
                "use train.compile=false, backend.stage=2, or train.backend=FSDP"
            )
    return problems


def layout(backend: BackendConfig, ranks: int, per_node: int) -> Layout:
    """Return how ``backend`` lays out ``ranks`` ranks, ``per_node`` to a node."""
    return resolve(ranks, per_node, backend.axes())


def accumulation(cfg: Config, dp: int) -> int:
    """Return the micro-steps per optimizer step for ``dp`` data-parallel ranks."""
    if cfg.train.global_batch_size is None:
        return cfg.optimizer.gas or 1
    return cfg.train.global_batch_size // (cfg.model.batch_size * dp)


def stages(backend: PPConfig, pp: int) -> int:
    """Return the stages of a pipeline of ``pp`` ranks."""
    if backend.schedule == "ZBVZeroBubble":
        return 2 * pp  # the stages form a V: each rank has one on its first half and one on its second
    return pp * backend.stages_per_rank if backend.schedule in INTERLEAVED else pp


def microbatches(cfg: Config, backend: PPConfig, pp: int) -> int:
    """Return the micro-batches that a micro-step's sequences are split into for the pipeline."""
    return backend.microbatches or math.gcd(cfg.model.batch_size, pp)


def _check_batch(cfg: Config, dp: int) -> list[str]:
    batch, per_micro_step = cfg.train.global_batch_size, cfg.model.batch_size * dp
    if batch is None or per_micro_step < 1:
        return []
    if batch < 1 or batch % per_micro_step:
        fits = max(1, round(batch / per_micro_step)) * per_micro_step
        return [
            f"train.global_batch_size={batch} is not a multiple of model.batch_size={cfg.model.batch_size} "
            f"x {dp} data-parallel ranks = {per_micro_step}: use {fits}, or another model.batch_size"
        ]
    if cfg.optimizer.gas not in (None, batch // per_micro_step):
        return [
            f"train.global_batch_size={batch} needs {batch // per_micro_step} micro-steps of {per_micro_step} "
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
        "only the last may: use backend.static_graph=false, or optimizer.gas=1 with a larger model.batch_size"
    ]


def _check_layout(cfg: Config, at: Layout) -> list[str]:
    """Compare the model and the batch with the layout of the ranks."""
    problems = []
    if isinstance(cfg.backend, FSDPConfig):
        problems += [*_check_tensor(cfg.model, at.tp), *_check_sharding(cfg, cfg.backend, at)]
    if isinstance(cfg.backend, PPConfig):
        problems += _check_pipeline(cfg, cfg.backend, at)
    return problems


def _check_sharding(cfg: Config, backend: FSDPConfig, at: Layout) -> list[str]:
    problems = []
    if backend.cpu_offload and at.shard == 1:
        problems.append(
            "backend.cpu_offload=true moves shards to the host, and with backend.shard=1 there are none: "
            "use backend.shard=-1 backend.replicate=1, or backend.cpu_offload=false"
        )
    if at.size == 1:
        problems.append(
            f"train.backend={cfg.train.backend} shards the model across ranks, and there is only one: "
            "use launch -n 2, or train.backend=DDP"
        )
    if DTYPES[cfg.train.dtype] == "fp16":
        problems.append(
            "train.dtype=fp16 needs a loss scaler, which sharded gradients do not have: with train.backend="
            f"{cfg.train.backend} use train.dtype=bf16 or fp32"
        )
    return problems


def _check_tensor(model: ModelConfig, tp: int) -> list[str]:
    """Check that the ranks of a tensor-parallel group get complete heads and equally many hidden units and tokens."""
    problems = []
    for name in model.tensor_parallel_options():
        size = getattr(model, name) or 0
        if size % tp:
            fits = math.lcm(size, tp) if name == "n_kv_head" else math.ceil(size / tp) * tp
            problems.append(
                f"model.{name}={size} is not divisible by backend.tp={tp}: "
                f"use model.{name}={fits}, or another backend.tp"
            )
    return problems


def _check_pipeline(cfg: Config, backend: PPConfig, at: Layout) -> list[str]:
    problems = []
    count, parts = stages(backend, at.pp), microbatches(cfg, backend, at.pp)
    if count > cfg.model.n_layer:
        problems.append(
            f"a pipeline of {count} stages (backend.pp={at.pp}, backend.schedule={backend.schedule}) needs as many "
            f"blocks, but model.n_layer={cfg.model.n_layer}: use a smaller backend.pp, or a deeper model"
        )
    if cfg.model.batch_size % parts:
        problems.append(
            f"backend.microbatches={parts} does not divide model.batch_size={cfg.model.batch_size}: "
            f"use {math.gcd(cfg.model.batch_size, parts)}, or another model.batch_size"
        )
    total = parts * accumulation(cfg, at.dp)
    if backend.schedule != "GPipe" and total % at.pp:
        problems.append(
            f"backend.schedule={backend.schedule} needs a multiple of backend.pp={at.pp} micro-batches in a step, "
            f"not {total}: change model.batch_size, optimizer.gas or backend.microbatches, or use GPipe"
        )
    return problems + (_check_zero_bubble(cfg, backend, at) if backend.zero_bubble else [])


def _check_zero_bubble(cfg: Config, backend: PPConfig, at: Layout) -> list[str]:
    """Check for what a backward pass in two parts, inputs before weights, does not support."""
    train = cfg.train
    conflicts = [
        (at.shard > 1, f"backend.shard={at.shard} cannot", "backend.shard=1"),
        (at.tp > 1, f"backend.tp={at.tp} cannot", "backend.tp=1"),
        (train.compile, "compiled blocks cannot", "train.compile=false"),
        (
            train.activation_checkpointing != "none",
            "would recompute checkpointed activations twice",
            "train.activation_checkpointing=none",
        ),
    ]
    return [
        f"backend.schedule={backend.schedule} splits the backward pass in two, which {reason}: "
        f"use {remedy}, or backend.schedule=1F1B"
        for is_conflict, reason, remedy in conflicts
        if is_conflict
    ]


def _check_deepspeed(cfg: Config, backend: DeepSpeedConfig, ranks: int | None) -> list[str]:
    """Check that the package is installed, and a ds_config file; ``ranks`` is None if their number is unsuitable."""
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
