"""Checks before the first step that checkpoints can hold what hooks keep."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from wordrun.backend.torch_backend import TorchBackend
from wordrun.common.errors import ConfigError
from wordrun.train.hooks.base import HookError, Training
from wordrun.train.hooks.plain_state import as_json


def check(trainer: Training) -> None:
    """Check the states and the tensors of all hooks, unless the run saves no checkpoints; every rank must call this.

    Raises:
        HookError: a checkpoint would change a state.
        ConfigError: a tensor belongs to no weight.
    """
    if not trainer.cfg.train.saves:
        return
    for name, hook in trainer.hooks.items():
        try:
            state = hook.state()
        except Exception:  # it may need the first step; if it fails again, saving the first checkpoint reports it
            continue
        try:
            as_json(state)
        except TypeError as error:
            raise HookError(f"the hook {name} failed in state", error, type(hook)) from None
    tensors(trainer)


def tensors(trainer: Training) -> dict[str, Tensor]:
    """Return the tensors of all hooks, by their names in a checkpoint.

    Raises:
        ConfigError: one belongs to no weight.
    """
    found, backend = trainer.hooks.tensors(), trainer.backend
    if not found or not isinstance(backend, TorchBackend):
        return found
    state = backend.model_state()
    weights = {name.removeprefix("model."): tensor.shape for name, tensor in state.items()}
    for stored, tensor in found.items():
        _, hook, name = stored.split(".", 2)
        if name not in weights and not (trainer.layout.pp > 1 and name in _in_any_stage(trainer)):
            frozen = any(name == each for part in backend.parts for each, _ in part.named_parameters())
            what = "is frozen, so checkpoints do not contain it" if frozen else "is not a weight"
            raise ConfigError(
                f"the hook {hook}: tensors() has {name!r}, which {what}: return small values as lists in state()"
            )
        if tensor.shape != weights.get(name, tensor.shape):
            raise ConfigError(
                f"the hook {hook}: tensors()[{name!r}] has the shape {list(tensor.shape)}, and the weight "
                f"{list(weights[name])}: return small values as lists in state()",
                page="train.md#hooks",
            )
    return found


def _in_any_stage(trainer: Training) -> set[str]:
    """Return the names of the weights of all stages of a pipeline."""
    model = cast("Any", trainer.task).make_model()
    return {name for name, _ in model.weights()}
