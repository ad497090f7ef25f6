"""Settings for DeepSpeed's engine: the run's options merged with a user's ds_config file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError
from wordrun.train.optim.options import OptimizerConfig
from wordrun.train.options import DTYPES

AUTO = "auto"
"""In a ds_config file, stands for the value from the run's options or, without one, for DeepSpeed's default."""
REFUSED = {
    "scheduler": "the learning rate follows optimizer.learning_rate, warmup_iters, min_lr and schedule",
    "tensor_parallel": "wordrun's own tensor parallelism is train.backend=TP",
    "sequence_parallel_size": "every rank reads its own share of the data",
}
"""Unsupported blocks and the reasons."""


def merge(cfg: Any, backend: Any, dtype: str, ranks: int | None, gas: int | None) -> dict[str, Any]:
    """Return the settings for DeepSpeed's engine.

    Args:
        cfg: the run's config.
        backend: the run's DeepSpeedConfig.
        dtype: compute precision; auto if not known yet, which skips its comparison.
        ranks: number of ranks; None if unknown, which skips comparisons that depend on it.
        gas: micro-steps per optimizer step; None as for ``ranks``.

    Raises:
        ConfigError: if the file cannot be read or contradicts the run; the message names every such key.
    """
    merged = _read(backend.config) if backend.config else {}
    problems = [f"{key}: {reason}: remove it from the file" for key, reason in REFUSED.items() if key in merged]
    if "bfloat16" in merged:  # DeepSpeed accepts both names
        merged.setdefault("bf16", merged.pop("bfloat16"))
    for key, (option, ours) in _settings(cfg, backend, dtype, ranks, gas).items():
        *sections, name = key.split(".")
        node = merged
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                problems.append(f"{section}={json.dumps(node)} should be a block with {name} in it")
                node = {}
        theirs = node.get(name, AUTO)
        if theirs not in (AUTO, ours) and str(theirs).lower() != str(ours).lower():
            problems.append(
                f'{key}={json.dumps(theirs)}, but {option} makes it {json.dumps(ours)}: write "auto" into the file, '
                f"or change {option}"
            )
        node[name] = ours
    if problems:
        raise ConfigError(
            "\n".join(dict.fromkeys(f"backend.config={backend.config}: {text}" for text in problems)),
            page="backends.md#deepspeed",
        )
    merged.pop("optimizer")  # the engine gets the run's optimizer
    # The run's optimizer is used on CPUs too, so they need none of DeepSpeed's compiled ops.
    return _without_auto(merged) | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def _settings(cfg: Any, backend: Any, dtype: str, ranks: int | None, gas: int | None) -> dict[str, tuple[str, Any]]:
    """Map each DeepSpeed key that the run determines to the option that sets it, and its value."""
    optimizer, device = cfg.optimizer, {True: "cpu", False: "none"}
    settings: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("model.batch_size", cfg.model.batch_size),
        "gradient_clipping": ("optimizer.grad_clip", optimizer.grad_clip),
        "optimizer.type": ("optimizer", optimizer.name),
        **_optimizer_params(optimizer),
        "zero_optimization.stage": ("backend.stage", backend.stage),
        "zero_optimization.offload_optimizer.device": ("backend.offload_optimizer", device[backend.offload_optimizer]),
        "zero_optimization.offload_param.device": ("backend.offload_params", device[backend.offload_params]),
    }
    if ranks is not None and gas is not None:
        settings["gradient_accumulation_steps"] = ("train.accumulation", gas)
        settings["train_batch_size"] = ("train.global_batch_size", cfg.model.batch_size * ranks * gas)
    if DTYPES.get(dtype, AUTO) != AUTO:
        settings["bf16.enabled"] = ("train.dtype", DTYPES[dtype] == "bf16")
        settings["fp16.enabled"] = ("train.dtype", DTYPES[dtype] == "fp16")
    if backend.bucket_elements is not None:
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            settings[f"zero_optimization.{name}"] = ("backend.bucket_elements", backend.bucket_elements)
    if backend.keep_below is not None:
        settings["zero_optimization.stage3_param_persistence_threshold"] = ("backend.keep_below", backend.keep_below)
    if backend.overlap_comm is not None:
        settings["zero_optimization.overlap_comm"] = ("backend.overlap_comm", backend.overlap_comm)
    return settings


def _optimizer_params(optimizer: OptimizerConfig) -> dict[str, tuple[str, Any]]:
    """Return the optimizer parameters for DeepSpeed, which uses torch's names."""
    common = {f.name for f in fields(OptimizerConfig)} - {"weight_decay"}
    own: dict[str, Any] = {f.name: getattr(optimizer, f.name) for f in fields(optimizer) if f.name not in common}
    params: dict[str, tuple[str, Any]] = {"lr": ("optimizer.learning_rate", optimizer.learning_rate)}
    if "beta1" in own:
        params["betas"] = ("optimizer.beta1 and beta2", [own.pop("beta1"), own.pop("beta2")])
        params["eps"] = ("optimizer", 1e-8)
    params |= {name: (f"optimizer.{name}", value) for name, value in own.items()}
    return {f"optimizer.params.{name}": value for name, value in params.items()}


def _read(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"backend.config={path} cannot be read ({error.strerror}): name a ds_config file") from None
    except ValueError as error:
        raise ConfigError(f"backend.config={path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"backend.config={path} should hold one block of settings in braces")
    return content


def _without_auto(node: dict[str, Any]) -> dict[str, Any]:
    inside = {key: _without_auto(value) if isinstance(value, dict) else value for key, value in node.items()}
    return {key: value for key, value in inside.items() if value != AUTO}
