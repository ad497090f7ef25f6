"""The base model of a LoRA run: where it is, and whether a checkpoint's adapters were trained with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from wordrun import dist
from wordrun.common import files
from wordrun.common.errors import ConfigError
from wordrun.config.schema import Config
from wordrun.model import lora
from wordrun.model.base import Model

HF = "hf:"


def source_of(cfg: Config, stored: Mapping[str, Any]) -> str | None:
    """Return where a run with ``cfg`` reads its initial weights: train.init_from or, for LoRA, what is known to be it.

    A run that is resumed with the same train.init_from takes the checkpoint that it began with, although that run may
    have newer ones by now.

    Args:
        cfg: the config.
        stored: the manifest of the checkpoint from which the run is resumed, or nothing.
    """
    source = cfg.train.init_from
    then = stored.get("config", {}).get("train", {}).get("init_from")
    if not cfg.lora_rank or "base" not in stored or source != then:
        return source
    known = str(stored["base"]["source"])
    return known if Path(known).exists() else source  # the folder of the base may have been moved


def described(
    weights: Mapping[str, Tensor],
    model: Model,
    folder: Path | None,
    cfg: Config,
    world: dist.World,
    stored: Mapping[str, Any],
) -> dict[str, str]:
    """Return a manifest's entry about the base model; every rank must call this.

    Args:
        weights: of the base model; rank 0 alone reads them.
        model: the base model, on the meta device.
        folder: the checkpoint from which they are; None: they are in Hugging Face's format.
        cfg: the config.
        world: the ranks.
        stored: the manifest of the checkpoint from which the run is resumed, or nothing.

    Raises:
        ConfigError: the adapters in ``stored`` were trained with another base model.
    """
    source = str(folder or cfg.train.init_from)
    name = source.removeprefix(HF)
    if folder is None and Path(name).expanduser().exists():  # else the name of a model
        source = HF + str(files.absolute(name))
    known = stored.get("base")
    found = None
    if world.rank == 0:
        same = known is None or lora.digest_like(known["digest"], weights, model) == known["digest"]
        found = [lora.digest(weights, model), same]
    digest, same = dist.broadcast(found, world)
    if known and not same:
        raise ConfigError(
            f"train.init_from={cfg.train.init_from}: {source} has other weights than {known['source']} had when the "
            f"adapters in the checkpoint began to train: use train.init_from={known['source']} with its original "
            "weights, or a copy of them"
        )
    return {"source": source, "digest": digest}
