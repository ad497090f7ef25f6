"""Reads checkpoints of nanoGPT and wordplay (``ckpt.pt``) into ``model=gpt``: ``train.init_from=nanogpt:FILE``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun.common.errors import ConfigError, UserError, unpickling_problem
from wordrun.model import pretrained
from wordrun.model.base import LazyWeights
from wordrun.model.options import GPTConfig, TransformerConfig

PREFIX = "nanogpt:"
SHAPES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
NO_EFFECT = ("dropout", "batch_size", "name")
"""Entries of ``model_args`` that do not change what the model computes from its weights."""
COMPILED = "_orig_mod."
"""Prefix of the weights' names if the model was compiled."""
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Matrices that transformers' GPT-2 stores transposed, and nanoGPT does not."""


def open_weights(source: str, cfg: TransformerConfig, vocab_size: int | None = None) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint by the names of our model's ``state_dict``.

    Args:
        source: the path of the checkpoint, after ``nanogpt:``.
        cfg: the model that is initialized with them.
        vocab_size: rows of its embedding if ``cfg`` does not set it; None: as many as in the file.

    Raises:
        ConfigError: the weights belong to a different model; the message has the options that fit.
        UserError: the file cannot be read, or needs code to be read.
    """
    path = Path(os.path.expanduser(source))
    state, described = _read(path)
    problems, overrides = pretrained.differences(path, described, cfg, vocab_size, "gpt2")
    readers = {name: partial(_as_in_transformers, name, tensor) for name, tensor in state.items()}
    files = LazyWeights(readers)
    shapes = {name: _as_in_transformers(name, tensor.to("meta")).shape for name, tensor in state.items()}
    return pretrained.fitting(path, (files, shapes), described, cfg, (problems, overrides))


def _read(path: Path) -> tuple[dict[str, Tensor], GPTConfig]:
    """Return the weights by nanoGPT's names, and the options of the model."""
    if not path.is_file():
        raise ConfigError(f"{PREFIX}{path} is not a file: name a checkpoint of nanoGPT, such as out/ckpt.pt")
    try:
        content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        arguments: dict[str, Any] = dict(content["model_args"])
        state = {name.removeprefix(COMPILED): tensor for name, tensor in content["model"].items()}
        shape: dict[str, Any] = {name: int(arguments.pop(name)) for name in SHAPES}
        described = GPTConfig(bias=bool(arguments.pop("bias")), gelu="none", **shape)
    except Exception as error:  # torch and pickle have their own, and the file may contain anything
        why = f"lacks {error}" if isinstance(error, KeyError) else unpickling_problem(error)
        raise UserError(f"{path} is not a checkpoint of nanoGPT that can be read without running code: {why}") from None
    if arguments.get("activation") == "gelu":  # wordplay's
        del arguments["activation"]
    if unknown := {name: value for name, value in arguments.items() if name not in NO_EFFECT and value}:
        shown = ", ".join(f"{name}={value!r:.60}" for name, value in unknown.items())
        raise ConfigError(f"{path} has {shown} in model_args, which wordrun does not know")
    return state, described


def _as_in_transformers(name: str, tensor: Tensor) -> Tensor:
    return tensor.T if name.endswith(TRANSPOSED) else tensor
