"""The schema: every option with its type, default, unit and meaning. YAML files under conf/ hold only differences.

``wordrun --help`` and docs/reference.md are made from the text under each field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from wordrun.errors import ConfigError, nearest

DTYPES = {
    "auto": "auto",
    "fp32": "fp32", "float32": "fp32",
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16",
}  # fmt: skip


@dataclass
class ModelConfig:
    """A GPT-2 style transformer."""

    name: str = "nano"
    """Name of the preset; part of the run directory."""
    n_layer: int = 4
    """Number of transformer blocks."""
    n_head: int = 4
    """Number of attention heads; must divide n_embd."""
    n_embd: int = 128
    """Width of the residual stream."""
    block_size: int = 64
    """Tokens in a sequence."""
    batch_size: int = 12
    """Sequences per rank and micro-step."""
    dropout: float = 0.0
    """Probability of dropping an activation, 0 to less than 1."""
    bias: bool = False
    """Biases in the linear layers and norms, as GPT-2 has them."""
    vocab_size: int | None = None
    """Rows of the embedding; null: as many as the tokenizer has."""


@dataclass
class DataConfig:
    """Where the text comes from."""

    name: str = "shakespeare"
    """Name of the data set; part of the run directory."""
    kind: str = "file"
    """file (path), download (path, else url) or sample (embedded, made by a seeded generator)."""
    path: str | None = None
    """The text file, in UTF-8."""
    url: str | None = None
    """Where to download the file from if it is not at path."""
    sha256: str | None = None
    """Expected hash of the file; another content is refused."""
    offline: str = "error"
    """What to do when the download fails: error, or sample to train on the embedded text with a banner."""
    val_fraction: float = 0.1
    """Share of the text, from its end, that is kept for validation."""


@dataclass
class BackendConfig:
    """How one optimizer step runs in parallel."""

    name: str = "DDP"
    """Name of the backend; set by train.backend."""


@dataclass
class DDPConfig(BackendConfig):
    """Distributed data parallel: the model on every rank, gradients averaged."""

    name: str = "DDP"
    """Name of the backend; set by train.backend."""
    bucket_cap_mb: int = 25
    """Gradients are averaged in buckets of this many MiB, while the backward pass goes on."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets: one copy less in memory and time."""


BACKENDS: dict[str, type[BackendConfig]] = {"DDP": DDPConfig}


@dataclass
class OptimizerConfig:
    """AdamW with warm-up and cosine decay."""

    name: str = "adamw"
    """Name of the optimizer."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors (norms, biases) are not decayed."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.99
    """Decay of the mean of the squared gradients."""
    grad_clip: float = 1.0
    """Largest norm of all gradients together; 0: no clipping."""
    decay_lr: bool = True
    """Cosine decay to min_lr; false: constant after the warm-up."""
    warmup_iters: int = 100
    """Steps of linear warm-up."""
    lr_decay_iters: int | None = None
    """Step at which min_lr is reached; null: train.max_iters."""
    min_lr: float | None = None
    """Lowest learning rate; null: a tenth of learning_rate."""
    gas: int | None = None
    """Gradient accumulation steps: micro-steps per optimizer step; null: 1, or as train.global_batch_size needs."""


@dataclass
class TrainConfig:
    """The run."""

    backend: str = "DDP"
    """How to train in parallel: one of the backends."""
    max_iters: int = 2000
    """Optimizer steps."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks; sets optimizer.gas."""
    eval_interval: int = 250
    """Steps between evaluations; 0: never."""
    eval_iters: int | None = 50
    """Evaluate as many sequences as this many steps take, spread over the validation text; null: all of it."""
    log_interval: int = 10
    """Steps between lines of metrics."""
    sample_interval: int = 500
    """Steps between generated samples; 0: only at the end."""
    sample_tokens: int = 200
    """Length of a generated sample; 0: no samples."""
    sample_prompt: str = "\n"
    """What the samples begin with."""
    temperature: float = 0.8
    """Divides the logits when sampling: below 1 is safer, above 1 wilder."""
    top_k: int | None = 200
    """Sample from this many likeliest tokens; null: from all."""
    dtype: str = "auto"
    """Precision of the computation: fp32, bf16, fp16, or auto (bf16 where the device is fast at it, else fp32)."""
    compile: bool = False
    """Compile the model with torch.compile: minutes at the start, faster steps."""
    device: str = "auto"
    """auto (the accelerator if there is one), cpu, cuda or xpu."""
    seed: int = 1337
    """Seed of every random stream: weights, order of the data, dropout, samples."""
    timeout_s: int = 1800
    """Seconds before a collective that some rank never reached ends the run."""


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    name: str = "jsonl"
    """Name of the tracker."""


@dataclass
class WandbConfig(TrackerConfig):
    """Weights & Biases, on rank 0 only."""

    name: str = "wandb"
    """Name of the tracker."""
    mode: str = "auto"
    """auto (online if a key and the network are there, else offline), online or offline."""
    project: str = "wordrun"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null: the key's default."""
    group: str | None = None
    """W&B group of runs."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    probe_s: float = 3.0
    """Seconds that the search for the network may take in mode=auto."""


@dataclass
class ProfilerConfig:
    """What to measure besides the metrics."""

    name: str = "none"
    """Name of the profiler."""


@dataclass
class PyinstrumentConfig(ProfilerConfig):
    """Statistical profile of rank 0's Python, as HTML and text."""

    name: str = "pyinstrument"
    """Name of the profiler."""
    interval_s: float = 0.001
    """Seconds between samples of the stack."""


@dataclass
class Config:
    """Everything that a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    run_dir: str = ""
    """Where the run writes; comes from hydra.run.dir=DIR."""


@cache
def field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the documentation of each field of a config dataclass: the string literal under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            docs[statement.target.id] = inspect.cleandoc(after.value.value)  # type: ignore[attr-defined]
    return docs


def documentation(cls: type[Any]) -> dict[str, str]:
    """Return the documentation of each field of a config dataclass, those of its bases included."""
    return {name: text for base in reversed(cls.__mro__[:-1]) for name, text in field_docs(base).items()}


def check(cfg: Config, world_size: int = 1) -> None:
    """Raise one ConfigError that names every impossible value and combination of ``cfg``.

    Args:
        cfg: the composed config.
        world_size: number of data-parallel ranks, for what depends on it.
    """
    problems = [*_check_model(cfg.model), *_check_data(cfg.data), *_check_optimizer(cfg.optimizer)]
    problems += [*_check_train(cfg), *_check_batch(cfg, world_size), *_check_rest(cfg)]
    if problems:
        raise ConfigError("\n".join(problems))


def accumulation(cfg: Config, world_size: int) -> int:
    """Return the micro-steps per optimizer step for ``world_size`` data-parallel ranks."""
    if cfg.train.global_batch_size is None:
        return cfg.optimizer.gas or 1
    return cfg.train.global_batch_size // (cfg.model.batch_size * world_size)


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
    return problems


def _check_data(data: DataConfig) -> list[str]:
    problems = _one_of("data.kind", data.kind, ["file", "download", "sample"])
    problems += _one_of("data.offline", data.offline, ["error", "sample"])
    if data.kind in ("file", "download") and not data.path:
        problems.append(f"data={data.name} needs data.path=FILE, a text file")
    if data.kind == "download" and not (data.url and data.sha256):
        problems.append("data.kind=download needs data.url and data.sha256")
    if not 0 < data.val_fraction < 1:
        problems.append(f"data.val_fraction={data.val_fraction} should be between 0 and 1")
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
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            problems.append(f"optimizer.{name}={getattr(optimizer, name)} should be at least 0 and less than 1")
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


def _check_batch(cfg: Config, world_size: int) -> list[str]:
    whole, per_micro_step = cfg.train.global_batch_size, cfg.model.batch_size * world_size
    if whole is None or per_micro_step < 1:
        return []
    if whole < 1 or whole % per_micro_step:
        fits = max(1, round(whole / per_micro_step)) * per_micro_step
        return [
            f"train.global_batch_size={whole} is not a multiple of model.batch_size={cfg.model.batch_size} "
            f"x {world_size} data-parallel ranks = {per_micro_step}: use {fits}, or another model.batch_size"
        ]
    if cfg.optimizer.gas not in (None, whole // per_micro_step):
        return [
            f"train.global_batch_size={whole} needs {whole // per_micro_step} micro-steps of {per_micro_step} "
            f"sequences, but optimizer.gas={cfg.optimizer.gas}: leave one of the two out"
        ]
    return []


def _check_rest(cfg: Config) -> list[str]:
    problems: list[str] = []
    if isinstance(cfg.backend, DDPConfig):
        problems += _positive("backend", cfg.backend, "bucket_cap_mb")
    if isinstance(cfg.tracker, WandbConfig):
        problems += _one_of("tracker.mode", cfg.tracker.mode, ["auto", "online", "offline"])
        problems += _not_negative("tracker", cfg.tracker, "probe_s")
    if isinstance(cfg.profiler, PyinstrumentConfig) and not cfg.profiler.interval_s > 0:
        problems.append(f"profiler.interval_s={cfg.profiler.interval_s} should be more than 0")
    return problems


SCHEMAS: dict[str, dict[str, type[Any]]] = {
    "model": {"gpt": ModelConfig},
    "data": {"text": DataConfig},
    "backend": {name.lower(): node for name, node in BACKENDS.items()},
    "optimizer": {"adamw": OptimizerConfig},
    "train": {"default": TrainConfig},
    "tracker": {"jsonl": TrackerConfig, "wandb": WandbConfig},
    "profiler": {"none": ProfilerConfig, "pyinstrument": PyinstrumentConfig},
}
"""Config groups and their schemas; an option file under conf/GROUP begins with one of them."""

SECTIONS = tuple(f.name for f in fields(Config) if f.name != "run_dir")
