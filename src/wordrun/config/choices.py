"""Validation rules about combinations of choices: metrics, and sections that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from wordrun.backend.options import DDPConfig, FSDPConfig
from wordrun.common.validation import one_of
from wordrun.config import registry, schema
from wordrun.config.schema import Config
from wordrun.train.options import DTYPES


def problems(cfg: Config) -> Iterator[str]:
    """Yield every problem; none depends on the number of ranks."""
    yield from _sections(cfg)
    yield from _several(cfg)
    yield from check_float8(cfg)


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


def check_float8(cfg: Config) -> Iterator[str]:
    """Check the options that float8 linear layers need; the device is checked by the backend, which knows it."""
    float8 = f"train.float8={cfg.train.float8}"
    if cfg.train.float8 == "none":
        return
    if DTYPES.get(cfg.train.dtype) in ("fp32", "fp16"):
        yield f"{float8} casts from bf16, not from train.dtype={cfg.train.dtype}: use train.dtype=bf16"
    if type(cfg.backend) not in (DDPConfig, FSDPConfig) or getattr(cfg.backend, "tp", 1) != 1:
        yield (
            f"{float8} is for layers that a rank computes whole, with wordrun's own engines, not for "
            f"train.backend={cfg.train.backend}: use train.backend=FSDP or DDP"
        )
    if "ep" in cfg.model.divides or cfg.lora_rank:
        what = "LoRA has" if cfg.lora_rank else "experts are"
        yield f"{float8} is for linear layers, and {what} products of another kind: use train.float8=none"
