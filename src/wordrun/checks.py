"""What a config must not say: every impossible value and combination, found together and before anything starts."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from wordrun import ds_config
from wordrun.config import (
    BACKENDS,
    DTYPES,
    INTERLEAVED,
    MIX_PERIOD,
    SCHEDULES,
    ZERO_BUBBLE,
    BackendConfig,
    BPETokenizerConfig,
    Config,
    DataConfig,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    GPTConfig,
    HFTokenizerConfig,
    LlamaConfig,
    ModelConfig,
    OptimizerConfig,
    PPConfig,
    PyinstrumentConfig,
    TokenizerConfig,
    WandbConfig,
)
from wordrun.dist.mesh import AXES, Layout, resolve
from wordrun.errors import ConfigError, nearest


def check(cfg: Config, ranks: int | None = None, per_node: int | None = None) -> Layout:
    """Return the layout of the ranks, or raise one ConfigError that names every problem of ``cfg``.

    Args:
        cfg: the composed config.
        ranks: number of ranks; None: not known yet, and what depends on it is not checked.
        per_node: ranks on each node, if not all are on one.
    """
    problems = [*_check_model(cfg.model), *_check_tokenizer(cfg.tokenizer), *_check_data(cfg.data)]
    problems += _check_optimizer(cfg.optimizer)
    problems += [*_check_train(cfg), *_check_rest(cfg)]
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


def _positive(section: str, node: Any, *names: str) -> list[str]:
    return _at_least(1, section, node, names, "should be at least 1")


def _not_negative(section: str, node: Any, *names: str) -> list[str]:
    return _at_least(0, section, node, names, "should not be negative")


def _at_least(least: int, section: str, node: Any, names: tuple[str, ...], what: str) -> list[str]:
    values = [(name, getattr(node, name)) for name in names]
    return [f"{section}.{name}={value} {what}" for name, value in values if value is not None and not value >= least]


def _one_of(key: str, value: str, known: list[str]) -> list[str]:
    return [] if value in known else [f"{key}={value} should be one of {', '.join(known)}{nearest(value, known)}"]


def _check_model(model: ModelConfig) -> list[str]:
    problems = _positive("model", model, "n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size")
    if not problems and model.n_embd % model.n_head:
        below = model.n_embd // model.n_head * model.n_head
        fits = f"{below} or {below + model.n_head}" if below else f"{model.n_head}"
        problems.append(
            f"model.n_embd={model.n_embd} is not divisible by model.n_head={model.n_head}: "
            f"with {model.n_head} heads use n_embd={fits}"
        )
    if not 0 <= model.dropout < 1:
        problems.append(f"model.dropout={model.dropout} should be at least 0 and less than 1")
    if isinstance(model, GPTConfig):
        problems += _one_of("model.gelu", model.gelu, ["none", "tanh"])
    if isinstance(model, LlamaConfig):
        problems += _check_llama(model)
    return problems


def _check_llama(model: LlamaConfig) -> list[str]:
    problems = _positive("model", model, "n_kv_head", "n_hidden", "rope_factor")
    for name in ("rope_theta", "norm_eps"):
        if not 0 < getattr(model, name) < math.inf:
            problems.append(f"model.{name}={getattr(model, name)} should be a number above 0")
    if model.n_head < 1:
        return problems
    if model.n_kv_head is not None and model.n_kv_head > 0 and model.n_head % model.n_kv_head:
        fits = max(n for n in range(1, model.n_kv_head) if model.n_head % n == 0)
        problems.append(
            f"model.n_kv_head={model.n_kv_head} does not divide model.n_head={model.n_head}: "
            f"use model.n_kv_head={fits}, or another model.n_head"
        )
    if model.n_embd // model.n_head % 2:
        problems.append(
            f"model.n_embd={model.n_embd} and model.n_head={model.n_head} make heads of {model.n_embd // model.n_head} "
            f"elements, which the rotary embedding cannot pair: use model.n_embd={model.n_embd + model.n_head}"
        )
    return problems


def _check_data(data: DataConfig) -> list[str]:
    problems = _one_of("data.kind", data.kind, ["file", "download", "sample", "hf", "shards", "mix"])
    problems += _one_of("data.offline", data.offline, ["error", "sample"])
    if data.kind in ("file", "download") and not data.path:
        problems.append(f"data={data.name} needs data.path=FILE, a text file")
    if data.kind == "shards" and not data.path:
        problems.append(f"data={data.name} needs data.path=FOLDER, a folder of .bin or .npy files")
    if data.kind == "download" and not (data.url and data.sha256):
        problems.append("data.kind=download needs data.url and data.sha256")
    if data.kind == "hf" and not data.dataset:
        problems.append(f"data={data.name} needs data.dataset=NAME of a Hugging Face data set, or a FOLDER")
    if not 0 < data.val_fraction < 1:
        problems.append(f"data.val_fraction={data.val_fraction} should be between 0 and 1")
    problems += _positive("data", data, "shard_mb", "workers") + _not_negative("data", data, "ahead")
    return problems + _check_mix(data)


def _check_mix(data: DataConfig) -> list[str]:
    if data.kind != "mix":
        return [f"data.mix is for data=mix, not for data={data.name}: leave one of the two out"] if data.mix else []
    if not data.mix:
        return ["data=mix needs data.mix, the weight of each data set, such as 'data.mix={fineweb: 3, yelp: 1}'"]
    problems = [
        f"data.mix.{name}={weight:g} should be a number above 0"
        for name, weight in data.mix.items()
        if not 0 < weight < math.inf
    ]
    least = sum(data.mix.values()) / MIX_PERIOD
    return problems or [
        f"data.mix.{name}={weight:g} is less than 1 in {MIX_PERIOD} of all: leave it out, or raise it to {least:g}"
        for name, weight in data.mix.items()
        if weight < least
    ]


def _check_tokenizer(tokenizer: TokenizerConfig) -> list[str]:
    problems = _one_of("tokenizer.name", tokenizer.name, ["char", "byte", "gpt2", "bpe", "hf"])
    if isinstance(tokenizer, BPETokenizerConfig):
        problems += _positive("tokenizer", tokenizer, "train_mb")
        if tokenizer.vocab_size < 257:
            problems.append(
                f"tokenizer.vocab_size={tokenizer.vocab_size} should be at least 257: the bytes, and the mark between "
                "documents"
            )
    if isinstance(tokenizer, HFTokenizerConfig) and not tokenizer.path:
        problems.append("tokenizer=hf needs tokenizer.path=FOLDER, with the model's tokenizer.json")
    return problems


def _check_optimizer(optimizer: OptimizerConfig) -> list[str]:
    problems = _positive("optimizer", optimizer, "gas", "lr_decay_iters")
    problems += _not_negative("optimizer", optimizer, "warmup_iters", "grad_clip", "weight_decay", "min_lr")
    if not 0 < optimizer.learning_rate < float("inf"):
        problems.append(f"optimizer.learning_rate={optimizer.learning_rate} should be a number above 0")
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.learning_rate:
        problems.append(
            f"optimizer.min_lr={optimizer.min_lr} is above optimizer.learning_rate={optimizer.learning_rate}"
        )
    problems += _one_of("optimizer.scale_lr", optimizer.scale_lr, ["none", "sqrt", "linear"])
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            problems.append(f"optimizer.{name}={getattr(optimizer, name)} should be at least 0 and less than 1")
    return problems


def _check_saves(cfg: Config) -> list[str]:
    train = cfg.train
    problems = _not_negative("train", train, "checkpoint_interval") + _positive("train", train, "keep_checkpoints")
    problems += _one_of("train.on_save_error", train.on_save_error, ["continue", "stop"])
    problems += _one_of("train.on_nonfinite", train.on_nonfinite, ["stop", "skip", "rollback"])
    if train.on_nonfinite == "skip" and cfg.backend.name == "deepspeed":
        problems.append(
            "train.on_nonfinite=skip: DeepSpeed's engine takes every step by itself; use train.on_nonfinite=rollback"
        )
    if train.on_nonfinite == "rollback" and not train.checkpoint_interval:
        problems.append("train.on_nonfinite=rollback needs checkpoints: set train.checkpoint_interval")
    if train.init_from and train.resume not in (None, "auto"):
        problems.append(
            f"train.resume={train.resume} continues a run, and train.init_from={train.init_from} begins one: choose one"
        )
    return problems


def _check_train(cfg: Config) -> list[str]:
    train = cfg.train
    problems = _positive("train", train, "max_iters", "eval_iters", "log_interval", "top_k", "timeout_s")
    problems += _not_negative("train", train, "eval_interval", "sample_interval", "sample_tokens", "seed")
    for name, most in (("seed", 2**62), ("timeout_s", 10**8)):
        if getattr(train, name) > most:
            problems.append(f"train.{name}={getattr(train, name)} should be at most {most}")
    if train.dtype not in DTYPES:
        problems += _one_of("train.dtype", train.dtype, list(DTYPES))
    problems += _check_saves(cfg)
    checkpointing = train.activation_checkpointing
    if not (checkpointing.isdecimal() and int(checkpointing)):
        problems += _one_of("train.activation_checkpointing", checkpointing, ["none", "full", "selective", "N"])
    problems += _one_of("train.device", train.device, ["auto", "cpu", "cuda", "xpu"])
    if not 0 < train.temperature < float("inf"):
        problems.append(f"train.temperature={train.temperature} should be a number above 0")
    if not train.sample_prompt:
        problems.append("train.sample_prompt is empty: a sample has to begin with something, such as a line break")
    if train.backend not in BACKENDS:
        problems += _one_of("train.backend", train.backend, list(BACKENDS))
    elif train.backend != cfg.backend.name:
        problems.append(
            f"train.backend={train.backend}, but the options are those of backend={cfg.backend.name}: "
            f"choose by train.backend={cfg.backend.name} alone "
            "(in an experiment file: `- override /train.backend: NAME` in its defaults)"
        )
    return problems


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


def _check_rest(cfg: Config) -> list[str]:
    problems: list[str] = []
    if isinstance(cfg.backend, DDPConfig):
        problems += _positive("backend", cfg.backend, "bucket_cap_mb")
        problems += _one_of("backend.compress", cfg.backend.compress, ["none", "bf16"])
    if isinstance(cfg.backend, FSDPConfig):
        problems += _one_of("backend.reduce_dtype", cfg.backend.reduce_dtype, ["fp32", "bf16"])
        problems += _not_negative("backend", cfg.backend, "prefetch")
    if isinstance(cfg.backend, PPConfig):
        problems += _one_of("backend.schedule", cfg.backend.schedule, list(SCHEDULES))
        problems += _positive("backend", cfg.backend, "stages_per_rank", "microbatches")
    if isinstance(cfg.backend, DeepSpeedConfig):
        problems += _check_zero(cfg, cfg.backend)
    if isinstance(cfg.tracker, WandbConfig):
        problems += _one_of("tracker.mode", cfg.tracker.mode, ["auto", "online", "offline"])
        problems += _not_negative("tracker", cfg.tracker, "probe_s")
    if isinstance(cfg.profiler, PyinstrumentConfig) and not cfg.profiler.interval_s > 0:
        problems.append(f"profiler.interval_s={cfg.profiler.interval_s} should be more than 0")
    return problems


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


def _check_zero(cfg: Config, backend: DeepSpeedConfig) -> list[str]:
    problems = _positive("backend", backend, "bucket_elements") + _not_negative("backend", backend, "keep_below")
    if not 0 <= backend.stage <= 3:
        problems.append(f"backend.stage={backend.stage} should be 0, 1, 2 or 3")
    if backend.offload_optimizer and backend.stage == 0:
        problems.append(
            "backend.offload_optimizer=true needs optimizer state that the ranks share: backend.stage=1 to 3"
        )
    if backend.offload_params and backend.stage != 3:
        problems.append(
            f"backend.offload_params=true needs parameters that the ranks share: use backend.stage=3, "
            f"not {backend.stage}"
        )
    if cfg.train.compile and backend.stage == 3:
        problems.append(
            "train.compile=true: compiled blocks cannot wait for the parameters that backend.stage=3 gathers: "
            "use train.compile=false, backend.stage=2, or train.backend=FSDP"
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
