"""Initial weights from another run or from Hugging Face (train.init_from)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from wordrun import dist
from wordrun.checkpoint.saved import find
from wordrun.config import Config
from wordrun.errors import ConfigError
from wordrun.model import meta_model, pretrained


def initial_weights(cfg: Config, vocab_size: int, world: dist.World) -> Mapping[str, torch.Tensor] | None:
    """Return the weights that train.init_from names, by parameter, each read when accessed; None: random ones.

    Raises:
        UserError: there are none.
        ConfigError: they are a different model's.
    """
    source = cfg.train.init_from
    if source is None:
        return None
    if source.startswith("hf:"):
        folder = dist.share(pretrained.fetch(source.removeprefix("hf:")) if world.rank == 0 else None, world)
        return pretrained.open_weights(folder, cfg.model, vocab_size)
    # One rank verifies all files, and chooses an intact checkpoint for all.
    saved = find(dist.share(find(Path(source)).folder if world.rank == 0 else None, world), check=False)
    theirs = {name: p.shape for name, p in meta_model(saved.config.model, saved.vocab_size).weights()}
    ours = {name: p.shape for name, p in meta_model(cfg.model, vocab_size).weights()}
    different = [
        f"  {name} has the shape {_shown(theirs.get(name))} there and {_shown(ours.get(name))} here"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        more = ["  ..."] if different[8:] else []
        raise ConfigError(
            "\n".join([f"train.init_from={source} is not a model={cfg.model.name}:", *different[:8], *more])
        )
    return saved.weights()


def _shown(shape: torch.Size | None) -> str:
    return "x".join(map(str, shape)) if shape is not None else "none"
