"""Applies float8, activation checkpointing and torch.compile to a model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from wordrun import compat
from wordrun.backend import float8
from wordrun.backend.offload import offloaded
from wordrun.config import Config, checkpointing_of
from wordrun.model import Model


def prepare(model: Model, cfg: Config) -> None:
    """Apply activation checkpointing and torch.compile to ``model``, as set in ``cfg``."""
    for number, block in enumerate(model.blocks.children()):
        prepare_block(block, number, cfg)
    prepare_rest(model, cfg)


def prepare_rest(model: Model, cfg: Config) -> None:
    """Apply torch.compile to what is outside the blocks, or to the complete ``model``, as set in ``cfg``."""
    if cfg.train.compile is True:
        compile_rest(model, cfg.train.compile_scope)


def compile_rest(model: Model, scope: str) -> None:
    """Compile what is outside the blocks or, if ``scope`` is "model", the complete ``model``."""
    model.compile_loss()
    if scope == "model":
        compile_module(model)


def compile_module(module: nn.Module) -> None:
    """Compile ``module``, except for what the modules in it want to leave uncompiled."""
    for each in module.modules():
        if hasattr(each, "leave_uncompiled"):
            each.leave_uncompiled()  # type: ignore[operator]
    module.compile()


def prepare_block(block: Any, number: int, cfg: Config) -> None:
    """Apply float8, activation checkpointing, offloading and torch.compile to one block, as set in ``cfg``."""
    if cfg.train.float8 != "none":
        float8.convert(block, cfg.train.float8)
    kind = checkpointing_of(cfg.train.activation_checkpointing, number)
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _keep_products)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    elif kind == "full":
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if cfg.train.activation_offload:
        block.forward = offloaded(block.forward, block)
    if cfg.train.compile is True and cfg.train.compile_scope == "blocks":
        compile_module(block)  # per block: they are alike, so torch compiles only one


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else ""
    return CheckpointPolicy.MUST_SAVE if name in compat.PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
