"""Measures the size of each layer's activations, and of their change since the first step."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from wordrun.common.errors import ConfigError
from wordrun.model.transformer import Transformer
from wordrun.train.hooks.base import Hook, Training, due, native
from wordrun.train.hooks.options import CoordinatesConfig
from wordrun.train.metrics import evaluation_mode


class Coordinates(Hook):
    """Adds ``activation/LAYER`` and ``change/LAYER``: means of absolute values over a fixed batch of validation data.

    The layers are the input of the first block, each block with its attention and its MLP, and the logits.
    """

    def __init__(self, options: CoordinatesConfig) -> None:
        self.options = options
        self._first: dict[str, Tensor] = {}
        """The activations before the first step."""

    def setup(self, trainer: Training) -> None:
        """Check that each rank has complete activations.

        Raises:
            ConfigError: the model is divided, or is not one of wordrun's transformers.
        """
        cfg = trainer.cfg
        if math.prod((trainer.layout.cp, trainer.layout.tp, trainer.layout.pp)) > 1:
            raise ConfigError("hooks=[coordinates] needs unsplit layers: use train.backend=DDP")
        if not isinstance(trainer.backend.parts[0], Transformer):
            raise ConfigError(f"hooks=[coordinates] is for transformers, which model={cfg.model.name} is not")
        self._first = self._activations(trainer)

    def after_step(self, trainer: Training) -> None:
        """Record the activations."""
        if not due(trainer.step, self.options.interval):
            return
        found: dict[str, float] = {}
        for layer, now in self._activations(trainer).items():
            found[f"activation/{layer}"] = float(now.abs().mean())
            found[f"change/{layer}"] = float((now - self._first[layer]).abs().mean())
        trainer.log_metrics(found)

    @torch.no_grad()
    def _activations(self, trainer: Training) -> dict[str, Tensor]:
        """Return the outputs of all layers for the fixed batch."""
        backend, task = native(trainer, "coordinates"), cast("Any", trainer.task)
        model: Any = backend.parts[0]
        found: dict[str, Tensor] = {}

        def keep(layer: str) -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                found[layer] = output.float()

            return hook

        def keep_input(module: Any, inputs: Any) -> None:
            found["embedding"] = inputs[0].float()

        handles = [next(model.blocks.children()).register_forward_pre_hook(keep_input)]
        for key, block in model.blocks.named_children():
            for part in ("attention", "mlp"):
                handles.append(getattr(block, part).register_forward_hook(keep(f"blocks.{key}.{part}")))
            handles.append(block.register_forward_hook(keep(f"blocks.{key}")))
        batch, _ = task.validation_set(trainer.cfg.model.batch_size)[0]
        try:
            with evaluation_mode(backend), backend.forward_context():
                found["logits"] = model(batch.to(backend.device).tokens)[..., : task.vocab_size].float()
        finally:
            for handle in handles:
                handle.remove()
        return found
