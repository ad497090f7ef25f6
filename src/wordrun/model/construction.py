"""Builds the model that a config describes: first its shapes on the meta device, then its memory and weights."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wordrun.common.errors import ConfigError
from wordrun.config.registry import part_of
from wordrun.model import lora
from wordrun.model.base import Model
from wordrun.model.options import ModelConfig, TransformerConfig
from wordrun.model.plain_module import adapt, check_losses, path_of_blocks
from wordrun.model.transformer import Transformer

M = TypeVar("M", bound=Model)
DRAWING = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_)
"""Functions that fill a tensor with random numbers, and have no effect on the meta device."""


def meta_model(
    cfg: TransformerConfig, vocab_size: int, layers: Sequence[int] | None = None, multiple: int = 1
) -> Transformer:
    """Return the transformer that ``cfg`` describes, or a pipeline stage of it, on the meta device.

    Args:
        cfg: the model's options.
        vocab_size: size of the tokenizer's vocabulary, which ``cfg.vocab_size`` may exceed.
        layers: numbers of the stage's blocks; None: all.
        multiple: pad the vocabulary to a multiple of this.
    """
    model: Transformer = new_model(cfg, vocab_size=vocab_size, layers=layers, multiple=multiple)
    return model


def new_model(cfg: ModelConfig, **arguments: Any) -> Any:
    """Return the model that ``cfg`` describes on the meta device: shapes without memory.

    Args:
        cfg: the model's options.
        arguments: what else its constructor takes, which depends on the data.

    Raises:
        ConfigError: the constructor does not take these arguments or fails, or what it returns cannot be trained.
    """
    part = part_of("model", cfg)
    make = part.load()
    try:
        inspect.signature(make).bind(cfg, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{part} does not fit the data: its constructor should take {', '.join(['cfg', *arguments])} ({error}). "
            "Choose another model or other data, or change the constructor"
        ) from None
    with part.blamed(" on the meta device, where tensors have no values"), torch.device("meta"), _WithoutReferences():
        model = make(cfg, **arguments)
        if isinstance(model, Transformer) and model.cfg.lora_rank:
            lora.adapt(model, model.cfg)
    try:
        check_losses(model)
        _to_meta(model)
        at = path_of_blocks(model)
        if not isinstance(model, Model):
            model = adapt(model, partial(make, cfg, **arguments))
    except ConfigError as error:
        raise ConfigError(f"{part}: {error}") from None
    if not at:  # it is sharded and compiled as a whole
        model.add_module("blocks", nn.ModuleDict())
    elif at != model.blocks_at:
        model.use_blocks_at(at)
    return model


def settled_options(cfg: ModelConfig) -> Any:
    """Return ``cfg`` as its model completes it from files, see ``Model.settle_options``."""
    settle = getattr(part_of("model", cfg).load(), "settle_options", None)
    return cfg if settle is None else settle(cfg)


def _to_meta(model: nn.Module) -> None:
    """Replace tensors that the constructor has put on another device, such as buffers made from NumPy arrays."""
    replaced: dict[Tensor, Tensor] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if not tensor.is_meta:
                empty = torch.empty_like(tensor, device="meta")
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, tensor.requires_grad)
                setattr(module, name, replaced.setdefault(tensor, empty))


class _WithoutReferences(TorchFunctionMode):
    """Replaces functions that torch implements for the meta device in Python, since these import its compiler."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function``, or do what has the same effect."""
        kwargs = kwargs or {}
        if function in DRAWING:  # there is nothing to fill
            return args[0] if args else kwargs["tensor"]
        if function is torch.empty_like:
            like = args[0]
            device = kwargs.get("device") or like.device
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return function(*args, **kwargs)


def build(cfg: TransformerConfig, vocab_size: int, seed: int = 0, device: torch.device | str = "cpu") -> Transformer:
    """Return the model that ``cfg`` describes on ``device``, initialized with ``seed``."""
    return materialize(meta_model(cfg, vocab_size), seed, device)


def materialize(model: M, seed: int, device: torch.device | str) -> M:
    """Allocate a meta model on ``device`` and initialize it."""
    with _WithoutReferences():
        model.to_empty(device=device)
    model.tie_all()
    model.initialize(seed)
    return model
