"""Trained models and their tokenizers in Python: ``wordrun.load`` and ``wordrun.load_tokenizer``."""

from __future__ import annotations

import contextlib
import sys
from contextvars import ContextVar
from pathlib import Path

import torch

from wordrun.checkpoint.load import InnerLoadError, find
from wordrun.common.errors import ConfigError, UserError
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.model.base import Model

_loading: ContextVar[tuple[Path, ...]] = ContextVar("loading", default=())
"""The checkpoints that are being loaded, each by the constructor of the one before it."""


def load(
    run: str | Path = "outputs/latest",
    checkpoint: str | int = "latest",
    *,
    weights: str = "model",
    device: str | torch.device | None = None,
) -> Model:
    """Return the trained model of a run, an ``nn.Module`` in evaluation mode and fp32, saved by any layout of ranks.

    ``model.cfg`` has the options of wordrun's own models. Parts of a project are found as in a run: call this in its
    folder, or register them before. The constructor of a model may call this, for a teacher or a reference.

    Args:
        run: a run directory, or a checkpoint in one.
        checkpoint: latest, best, or a number of steps.
        weights: model, or ema for the averaged weights of a run with hooks=[ema].
        device: device of the model; None: torch's default device, which is the CPU, and in a constructor called by
            wordrun the one on which it builds the model.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
        ConfigError: it has no such weights.
    """
    default = torch.get_default_device()
    # In a constructor on the meta device, no values are read yet.
    where = default if device is None or default.type == "meta" else torch.device(device)
    is_inner = where.type == "meta"
    try:
        saved = find(Path(run), str(checkpoint), check=not is_inner)
        if saved.folder in _loading.get():
            raise ConfigError(f"{saved.folder} is the checkpoint of this model: name the run of the other model")
        outer = _loading.set((*_loading.get(), saved.folder))
        try:
            with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints while reading its checkpoints
                return saved.load_model(where, torch.float32, weights)
        finally:
            _loading.reset(outer)
    except UserError as error:
        if is_inner and not isinstance(error, InnerLoadError):
            raise InnerLoadError(f"wordrun.load({str(run)!r}) in the constructor of a model: {error}") from None
        raise


def load_tokenizer(run: str | Path = "outputs/latest", checkpoint: str | int = "latest") -> Tokenizer:
    """Return the tokenizer of a run on text, with the methods ``encode(text)`` and ``decode(tokens)``.

    Args:
        run: a run directory, or a checkpoint in one.
        checkpoint: latest, best, or a number of steps.

    Raises:
        UserError: there is no such checkpoint, or the run was on other data.
    """
    saved = find(Path(run), str(checkpoint), check=False)
    saved.require_text()
    return tokenizers.from_checkpoint(saved.tokenizer_json, saved.tokenizer_file)
