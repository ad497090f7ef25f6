"""Applies torch.compile to a model, after float8 and activation checkpointing, which it compiles as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wordrun.backend import float8
from wordrun.backend.activation_checkpointing import apply_checkpointing
from wordrun.config.schema import Config
from wordrun.dist.mesh import Layout
from wordrun.model.base import Model

Options = dict[str, Any] | None
"""Options of inductor, torch's compiler."""


def compile_options(device: torch.device, layout: Layout) -> Options:
    """Return inductor's options for ``device`` and ``layout``.

    On CPUs, the kernels are called from C++: calling them from Python takes 3 % of the passes of a small model (one
    thread). The C++ code cannot communicate, as blocks do under tensor, context or expert parallelism.
    """
    divided = layout.tp * layout.cp * layout.ep > 1
    return {"cpp_wrapper": True} if device.type == "cpu" and not divided else None


def prepare(model: Model, cfg: Config, options: Options = None) -> None:
    """Apply activation checkpointing and torch.compile to ``model``, as set in ``cfg``."""
    for number, block in enumerate(model.named_blocks().values()):
        prepare_block(block, number, cfg, options)
    prepare_rest(model, cfg, options)


def prepare_rest(model: Model, cfg: Config, options: Options = None) -> None:
    """Apply torch.compile outside the blocks or to the complete ``model``, and choose the loss, as set in ``cfg``."""
    model.choose_loss(chunked=cfg.train.chunked_loss)
    if cfg.train.compile is True:
        compile_rest(model, cfg.train.compile_scope, options)


def compile_rest(model: Model, scope: str, options: Options = None) -> None:
    """Compile what is outside the blocks or, if ``scope`` is "model", the complete ``model``."""
    model.compile_loss()
    if scope == "model":
        compile_module(model, options)


def compile_model(model: Model, scope: str, options: Options = None) -> None:
    """Compile ``model`` with train.compile_scope=``scope``."""
    compile_rest(model, scope, options)
    if scope == "blocks":
        for block in model.named_blocks().values():
            compile_module(block, options)


def compile_module(module: nn.Module, options: Options = None) -> None:
    """Compile ``module``, except for the parts that its modules exclude from compilation."""
    for each in module.modules():
        if hasattr(each, "leave_uncompiled"):
            each.leave_uncompiled()  # type: ignore[operator]
    module.compile(options=options)


def prepare_block(block: Any, number: int, cfg: Config, options: Options = None) -> None:
    """Apply float8, activation checkpointing, offloading and torch.compile to one block, as set in ``cfg``."""
    if cfg.train.float8 != "none":
        float8.convert(block, cfg.train.float8)
    apply_checkpointing(block, number, cfg.train)
    if cfg.train.compile is True and cfg.train.compile_scope == "blocks":
        compile_module(block, options)  # per block: they are identical, so torch compiles only one
