"""What replaces the default model, optimizer and schedule where a command line asks for something that they lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from wordrun.config.messages import name_of
from wordrun.model.options import GPTConfig, ModernConfig

MODEL, OTHER_MODEL = "modern", "nano"
"""The default, and nanoGPT's architecture, whose options are also those of wordplay."""
OPTIMIZER, OTHER_OPTIMIZER = "muon", "adamw"
"""The default model's, and the one that every backend supports."""
TRUE_OF_MODEL = "model.bias=false"
"""An option of the other model that says what the default model does anyway."""


class Settled(NamedTuple):
    """Overrides with what replaces the default model and optimizer."""

    overrides: list[str]
    composed: DictConfig
    replaced: str
    """A line that says what replaces them, and why; empty: nothing does."""


def settled(overrides: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> Settled:
    """Return the ``overrides`` with replacements where they need them, and what ``compose`` returns for these."""
    constant = "optimizer.decay_lr=false" in overrides and "schedule" not in map(name_of, overrides)
    words, about_model = _with_model([*["schedule=constant"] * constant, *overrides], compose)
    composed = compose(words)
    if not (about_optimizer := _needs_optimizer(words, composed)):
        return Settled(words, composed, about_model)
    words = [f"optimizer={OTHER_OPTIMIZER}", *words]
    return Settled(words, compose(words), about_optimizer)


def _with_model(overrides: list[str], compose: Callable[[list[str]], DictConfig]) -> tuple[list[str], str]:
    """Return ``overrides``, with model=nano if they set options of GPT-2's architecture that the default model lacks.

    An explicit choice of a model stays, and so does the model of an experiment or of images.
    """
    names = {name_of(override) for override in overrides}
    lacking = {f"model.{f.name}" for f in fields(GPTConfig)} - {f"model.{f.name}" for f in fields(ModernConfig)}
    if "model" in names or not names & lacking:
        return overrides, ""
    others = [override for override in overrides if name_of(override) not in lacking]
    if compose(others).hydra.runtime.choices.get("model") != MODEL:
        return overrides, ""
    asked = sorted({name_of(override) for override in overrides if override != TRUE_OF_MODEL} & lacking)
    if not asked:
        return others, ""
    why = f"model={OTHER_MODEL}, because the default, model={MODEL}, has no {' and no '.join(asked)}"
    return [f"model={OTHER_MODEL}", *overrides], why


def _needs_optimizer(overrides: list[str], composed: DictConfig) -> str:
    """Return why the backend needs another optimizer than that of the default model; empty: it does not."""
    backend: Any = OmegaConf.get_type(composed.backend)
    choices = composed.hydra.runtime.choices
    explicit = any(name_of(override) in ("optimizer", "experiment") for override in overrides)
    if explicit or choices.get("optimizer") != OPTIMIZER or backend.keeps_parameters:
        return ""
    default = f"train.backend={composed.train.backend} does not support optimizer={OPTIMIZER}, the default"
    return f"optimizer={OTHER_OPTIMIZER}, because {default}"
