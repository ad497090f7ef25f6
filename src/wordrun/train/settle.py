"""Settles a config before anything is built: what the data, the devices, the memory and a checkpoint decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wordrun import dist
from wordrun.backend.mixed_precision import settled_dtype
from wordrun.common.errors import ConfigError
from wordrun.common.section import frozen
from wordrun.config.rules import check
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.hang import watch
from wordrun.dist.mesh import Layout
from wordrun.model.construction import settled_options
from wordrun.train import resume
from wordrun.train.hooks.base import CheckpointHook
from wordrun.train.memory import MemoryPlan
from wordrun.train.run import Start
from wordrun.train.task import task_of


@dataclass(frozen=True)
class Settled:
    """What a run is made of."""

    cfg: Config
    """The options with which everything is built, and which config.yaml and checkpoints have; a frozen copy."""
    layout: Layout
    """The layout of the ranks."""
    start: Start
    """Where the run starts."""
    data: Any
    """The open data, as ``Task.open`` returned them."""
    banner: str | None
    """A warning to show if they are not the requested data."""
    memory: MemoryPlan


def with_settled_model(cfg: Config, world: World) -> Config:
    """Return ``cfg`` with the model's options as files complete them, and a tokenizer in the model's folder found."""
    model = dist.broadcast(settled_options(cfg.model) if world.rank == 0 else None, world)
    tokenizer: Any = cfg.tokenizer
    if (name := getattr(cfg.model, "path", None)) and getattr(tokenizer, "path", None) == name:
        tokenizer = replace(tokenizer, path=model.path)
    return replace(cfg, model=model, tokenizer=tokenizer)


def settle(cfg: Config, world: World, keepers: Sequence[CheckpointHook] = ()) -> Settled:
    """Return the run that ``cfg`` asks for on these ranks; every rank must call this.

    These options may differ from those in ``cfg``:

    - ``model``, if files complete its options;
    - ``data`` and ``run_dir``, if data.offline=sample has replaced the text;
    - ``train.device`` and ``train.dtype``, which name a device and the dtype in which it computes. With
      train.dtype=auto, a resumed run keeps that of its checkpoint;
    - ``train.activation_checkpointing``, which train.memory_budget_gb decides.

    Args:
        cfg: the composed config.
        world: the ranks.
        keepers: hooks that keep checkpoints elsewhere than on disk.

    Raises:
        UserError: the options contradict each other, the data, the memory or the checkpoint.
    """
    task = task_of(cfg)
    with watch.phase("preparing data", math.inf):  # may take hours; the other ranks watch its progress
        cfg = with_settled_model(cfg, world)
        resume.check_source(cfg, world, task.check_source)
        cfg, banner = task.settle(cfg, world)
    for hook in keepers:
        hook.open(cfg, world)
    start = resume.find(cfg, world, keepers)
    layout = check(cfg, world.size, world.per_node)
    watch.mark(layout=layout)
    device = torch.device(world.device).type
    if cfg.train.activation_offload and device == "cpu":
        raise ConfigError(
            "train.activation_offload=true moves activations from an accelerator to host memory, but this run is "
            "on CPUs, where they are in host memory anyway: omit it, or use train.activation_checkpointing"
        )
    dtype = settled_dtype(cfg, world, kept=start.manifest.get("dtype"))
    cfg = replace(cfg, train=replace(cfg.train, device=device, dtype=dtype))

    def open_data() -> Any:
        with watch.phase("preparing data", math.inf):
            return task.open(cfg, world)

    # A run that cannot fit is refused before the data are prepared, if the size of their vocabulary is known.
    shapes, data = task.shapes(cfg), None
    if shapes is None:
        data = open_data()
        shapes = task.shapes(cfg, data)
    memory = MemoryPlan(cfg, world, layout, shapes)
    if data is None:
        data = open_data()
    if memory.fit is not None:
        recomputed = memory.fit.cfg.train.activation_checkpointing
        cfg = replace(cfg, train=replace(cfg.train, activation_checkpointing=recomputed))
    return Settled(frozen(cfg), layout, start, data, banner, memory)
