"""The interface of tasks: a task turns the data into batches, builds the model, and reports on both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from wordrun import dist
from wordrun.backend.base import Backend, MakeModel
from wordrun.checkpoint.folder import locate
from wordrun.checkpoint.load import Saved, find
from wordrun.common import lazy
from wordrun.common.errors import ConfigError
from wordrun.common.section import value_text
from wordrun.config.schema import Config
from wordrun.data.loader import Loader
from wordrun.dist.mesh import Layout
from wordrun.model import mup, pretrained
from wordrun.model.base import Model
from wordrun.plan.parameter_shapes import ModelShapes
from wordrun.train.hooks.base import Hook
from wordrun.train.metrics import ValidationSet


def task_of(cfg: Config) -> type[Task]:
    """Return the class of the run's task, which its data name."""
    task: type[Task] = lazy.load(cfg.data.task)
    return task


class Task:
    """The data and the model of a run. The trainer itself handles only batches of examples, and their losses.

    Every rank must create one, of the settled config. Subclasses set the attributes.

    Args:
        cfg: the settled config.
        world: the ranks.
        layout: the layout of the ranks.
        data: what ``open`` returned.
        banner: the warning that ``settle`` returned.
    """

    unit = "examples"
    """What the examples are called."""
    make_model: MakeModel
    meta_model: Model
    """The complete model, on the meta device: shapes without memory."""
    no_samples = "the data are not text"
    """Why the model cannot generate text; empty: it can."""
    tokenizer_json: str | None = None
    """The tokenizer, which checkpoints contain; None: there is none."""
    tokens_per_example: int | None = None
    """Number of tokens of an example; None: examples have no tokens, and nothing about tokens is reported."""
    flops_per_example: int | None = None
    """Floating-point operations of an example's forward and backward pass; None: unknown."""

    def __init__(self, cfg: Config, world: dist.World, layout: Layout, data: Any, banner: str | None = None) -> None:
        self.cfg, self.layout, self.dp_rank = cfg, layout, layout.dp_index(world.rank)
        self.data, self.banner = data, banner

    @classmethod
    def settle(cls, cfg: Config, world: dist.World) -> tuple[Config, str | None]:
        """Return ``cfg`` for the data that are trained on, and a warning to show if they are not the requested data.

        Every rank must call this, before anything depends on the run directory.
        """
        return cfg, None

    @classmethod
    def check_source(cls, cfg: Config, source: str) -> None:
        """Check train.init_from=``source``, as far as that is possible before the data are read; one rank calls this.

        Raises:
            UserError: it does not exist.
            ConfigError: it has the weights of another model.
        """
        try:
            locate(Path(source))
        except ConfigError as error:
            raise ConfigError(f"train.init_from={source}: {error}") from None

    @classmethod
    def open(cls, cfg: Config, world: dist.World) -> Any:
        """Return the data, prepared if necessary; every rank must call this."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, cfg: Config, data: Any = None) -> ModelShapes | None:
        """Return the shapes of the run's model, from which its memory is estimated; None: unknown.

        Args:
            cfg: the config.
            data: what ``open`` returned; None: they are not open yet.
        """
        return None

    @property
    def initial_model(self) -> Model:
        """The model whose weights train.init_from names, on the meta device."""
        return self.meta_model

    def initial_weights(
        self, world: dist.World, stored: Mapping[str, Any] = MappingProxyType({})
    ) -> Mapping[str, torch.Tensor] | None:
        """Return the weights that train.init_from names, or the model's own, each read on access; None: random ones.

        Args:
            world: the ranks, all of which must call this.
            stored: the manifest of the checkpoint from which the run is resumed, or nothing.

        Raises:
            UserError: no weights were found.
            ConfigError: they belong to a different model.
        """
        source = self.cfg.train.init_from
        return self.meta_model.own_weights() if source is None else self.weights_in(source, world)[1]

    def weights_in(self, source: str, world: dist.World) -> tuple[Path, Mapping[str, torch.Tensor]]:
        """Return the checkpoint to which ``source``, a path, leads, and its weights, as ``initial_weights`` does."""
        # One rank verifies all files, and chooses an intact checkpoint for all.
        try:
            folder = find(Path(source)).folder if world.rank == 0 else None
        except ConfigError as error:
            raise ConfigError(f"train.init_from={source}: {error}") from None
        saved = find(dist.broadcast(folder, world), check=False)
        require_same_shapes(source, saved, self.cfg, self.initial_model)
        return saved.folder, mup.suited(saved.weights(), saved.config.model, self.cfg.model)

    def loader(self, gas: int, device: torch.device) -> Loader:
        """Return this rank's training batches, ``gas`` micro-batches for each step."""
        raise NotImplementedError

    def validation_set(self, count: int | None) -> ValidationSet:
        """Return this rank's share of ``count`` validation examples (None: all)."""
        raise NotImplementedError

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return what else an evaluation reports, given the ``means`` of the loss and of all metrics."""
        return {}

    def hooks(self) -> list[Hook]:
        """Return the hooks of this task."""
        return []

    def generate(self, backend: Backend, prompt: str | None = None, length: int | None = None, **options: Any) -> str:
        """Return ``prompt`` and its generated continuation; every rank must call this."""
        raise ConfigError(f"data={self.cfg.data.name} has no text, so its model cannot generate any")

    def facts(self) -> dict[str, Any]:
        """Return the entries of run.json about the data and the model."""
        raise NotImplementedError

    def fixed(self) -> dict[str, Any]:
        """Return what a resumed run must share with its checkpoint, besides options; keys are for people to read."""
        raise NotImplementedError

    def manifest(self, position: int) -> dict[str, Any]:
        """Return the task's entries for a checkpoint's manifest after ``position`` examples."""
        raise NotImplementedError

    def announce(self, examples: int) -> None:
        """Log the run's data, and the number of epochs of ``examples``."""
        raise NotImplementedError


def require_same_shapes(source: str, saved: Saved, cfg: Config, model: Model) -> None:
    """Raise a ConfigError if the weights of train.init_from=``source`` do not fit ``model`` of ``cfg``."""
    theirs = {name: p.shape for name, p in saved.meta_model().weights()}
    ours = {name: p.shape for name, p in model.weights()}
    different = [
        f"  {name}: shape {_shown(theirs.get(name))} there, {_shown(ours.get(name))} here"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        more = ["  ..."] if different[8:] else []
        first = f"the weights in train.init_from={source} do not fit model={cfg.model.name}:"
        there = saved.config.model
        options = [
            f"model.{field.name}={value_text(getattr(there, field.name))}"
            for field in fields(there)
            if field.name not in pretrained.FREE and getattr(there, field.name) != getattr(cfg.model, field.name, None)
        ]
        preset = [f"model={there.name}"] if there.name != cfg.model.name else []
        remedy = f"use the options of these weights: {' '.join(preset + options)}"
        raise ConfigError("\n".join([first, *different[:8], *more, remedy]))


def flops_of(model: Model, batch: Any) -> int | None:
    """Return the floating-point operations of the forward and backward passes of ``batch``; None: not countable.

    The backward pass takes twice as many as the forward pass, which runs on the meta device.
    """
    try:
        with FlopCounterMode(display=False) as counter:
            model.eval().losses(batch)
    except Exception:  # a model may do anything that has no meaning without values
        return None
    return 3 * int(counter.get_total_flops()) or None


def _shown(shape: torch.Size | None) -> str:
    return "x".join(map(str, shape)) if shape is not None else "none"
