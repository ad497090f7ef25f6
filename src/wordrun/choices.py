"""Validation rules about what is chosen together: hooks, metrics, sections that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from wordrun import config, registry
from wordrun.config import Config, DeepSpeedConfig, DilocoConfig
from wordrun.validation import one_of


def check(cfg: Config) -> Iterator[str]:
    """Yield every problem; none depends on the number of ranks."""
    yield from _sections(cfg)
    yield from _several(cfg)


def _several(cfg: Config) -> Iterator[str]:
    """Check the sections with several named parts; a config built in Python can use any names there."""
    if "jsonl" not in cfg.tracker:
        yield "tracker must include jsonl, which resuming a run requires: add it"
    for section in config.SEVERAL:
        known = registry.parts(section)
        for name, options in getattr(cfg, section).items():
            yield from one_of(section, name, known)
            if name in known and not known[name].configures(options):
                wanted = known[name].options
                yield f"{section}.{name} has the options of {type(options).__name__}: use {wanted.__name__}"
    if cfg.metrics and cfg.backend.pipeline:
        names = ",".join(cfg.metrics)
        yield f"metrics=[{names}] needs the model's outputs, which a pipeline leaves on its last stage: use metrics=[]"
    yield from _hooks(cfg)


def _hooks(cfg: Config) -> Iterator[str]:
    train, engine = cfg.train, cfg.backend.own_engine
    if "early_stop" in cfg.hooks and not train.eval_interval:
        yield "hooks=[early_stop] needs evaluations, but train.eval_interval=0: set it above 0"
    if "ema" in cfg.hooks and engine:
        yield (
            "hooks=[ema] cannot average the weights of train.backend=deepspeed, which are flattened and sharded inside "
            "its engine: use train.backend=DDP or FSDP"
        )
    if "ema" in cfg.hooks and cfg.backend.independent:
        yield (
            f"hooks=[ema] averages the weights of all ranks, and train.backend={train.backend} has others on each "
            "island: omit it, since the outer weights are already an average, or use train.backend=DDP or FSDP"
        )
    statistics = cfg.hooks.get("statistics")
    if isinstance(statistics, config.StatisticsConfig):
        if statistics.gradients and engine:
            yield (
                "hooks=[statistics] cannot read the gradients of train.backend=deepspeed, which its engine flattens: "
                "use hooks.statistics.gradients=false, or train.backend=DDP or FSDP"
            )
        if statistics.activations and train.compile is True:
            yield (
                "hooks=[statistics] cannot read activations inside compiled blocks: use "
                "hooks.statistics.activations=false, or train.compile=false"
            )
    test = cfg.hooks.get("lr_range")
    if isinstance(test, config.LRRangeConfig):
        for option, what in (("checkpoint_interval", "saved"), ("eval_interval", "evaluated")):
            if getattr(train, option):  # the hook's file sets 0, which an experiment overrides
                yield (
                    f"hooks=[lr_range] trains until the model diverges, which should not be {what}: use "
                    f"train.{option}=0"
                )
        if test.steps > train.max_iters:
            yield (
                f"hooks.lr_range.steps={test.steps} is more than train.max_iters={train.max_iters}: raise "
                "train.max_iters, or take fewer steps"
            )


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
        yield f"model.lora_rank={cfg.lora_rank} needs the weights that it adds to: set train.init_from"
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
    replicated = backend.replicated or (isinstance(backend, DilocoConfig) and backend.inner.upper() == "DDP")
    if train.compile_scope == "model" and not replicated:
        yield (
            f"train.compile_scope=model: train.backend={train.backend} runs code between the blocks, so they are "
            "compiled one by one: use train.compile_scope=blocks, or train.backend=DDP"
        )
    if isinstance(backend, DilocoConfig):
        if train.on_nonfinite == "skip":
            yield (
                "train.on_nonfinite=skip needs all ranks to agree on each step, and train.backend=diloco has islands "
                "that take steps by themselves: use train.on_nonfinite=rollback"
            )
        if config.DTYPES.get(train.dtype) == "fp16":
            yield "train.dtype=fp16 would scale losses differently on each island: use train.dtype=bf16 or fp32"
    if isinstance(backend, DeepSpeedConfig):
        if cfg.lora_rank:
            yield (
                f"model.lora_rank={cfg.lora_rank} does not work with DeepSpeed, whose checkpoints hold all "
                "weights: use train.backend=FSDP or DDP"
            )
        if isinstance(cfg.optimizer, config.MuonConfig):
            yield (
                "optimizer=muon needs whole matrices, but train.backend=deepspeed flattens and shards them inside its "
                "engine: use train.backend=FSDP or DDP"
            )
        if train.on_nonfinite == "skip":
            yield (
                "train.on_nonfinite=skip does not work with DeepSpeed, whose engine takes every step: "
                "use train.on_nonfinite=rollback"
            )
        if train.compile is True and backend.stage == 3:
            yield (
                "train.compile=true: compiled blocks cannot wait for the parameters that backend.stage=3 gathers: "
                "use train.compile=false, backend.stage=2, or train.backend=FSDP"
            )
