"""Which options a resumed run must share with its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wordrun.config import RENAMED, Config, to_plain
from wordrun.errors import ConfigError

FREE = {
    "model": {"name", "batch_size"},
    "data": {"path", "url", "offline", "prepared", "workers", "stage", "prefetch"},
    "tokenizer": {"path", "train_mb"},
    "optimizer": {"gas", "decay_lr"},
    "train": {
        "backend", "max_iters", "global_batch_size", "eval_interval", "eval_iters", "log_interval", "sample_interval",
        "sample_tokens", "sample_prompt", "temperature", "top_k", "compile", "activation_checkpointing", "device",
        "timeout_s", "checkpoint_interval", "keep_checkpoints", "save_best", "async_save", "on_save_error",
        "on_nonfinite", "resume", "init_from",
    },
    "backend": None, "tracker": None, "profiler": None, "hooks": None,
}  # fmt: skip
"""Options that may change when a run is resumed (None: the whole section): steps, intervals, layout, outputs."""


def fixed(cfg: Config) -> dict[str, Any]:
    """Return the options that a resumed run must share with its checkpoint, by their names."""
    return {
        f"{section}.{name}": value
        for section, values in to_plain(cfg).items()
        if (free := FREE.get(section, set())) is not None
        for name, value in values.items()
        if name not in free
    }


def config_hash(cfg: Config) -> str:
    """Return a hash of the options that a resumed run must share."""
    return hashlib.sha256(json.dumps(fixed(cfg), sort_keys=True).encode()).hexdigest()[:16]


def check(ours: Mapping[str, Any], manifest: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume with options that contradict the checkpoint.

    Args:
        ours: the options of this run, and what else has to be the same, by names that people know.
        manifest: of the checkpoint; options that are newer than it have their defaults in both.
        folder: the checkpoint.

    Raises:
        ConfigError: names each option with both values.
    """
    theirs = {RENAMED.get(name, name): value for name, value in {**manifest["fixed"], **manifest["facts"]}.items()}
    # Before there were schedules, an option of the optimizer chose between two of them.
    theirs.setdefault("schedule.name", "cosine" if theirs.get("optimizer.decay_lr", True) else "constant")
    different = [
        f"  {name} is {theirs[name]} in the checkpoint and {value} here"
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]
    if different:
        raise ConfigError(
            "\n".join([
                f"the options differ from those of the checkpoint {folder}:", *different,
                f"use the checkpoint's options, or only its weights: train.init_from={folder}",
            ])
        )  # fmt: skip
