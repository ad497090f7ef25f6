"""LoRA (Hu et al. 2021): frozen weights, and a trained product of two thin matrices beside each of some layers.

A checkpoint of a LoRA run holds only adapters. It names the base model that they were trained with, and has a checksum
of its weights, by which ``describe_base`` recognizes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from wordrun import dist
from wordrun.common import files
from wordrun.common.errors import ConfigError
from wordrun.config.schema import Config
from wordrun.model.base import LazyWeights, Model
from wordrun.model.dropout import Dropout
from wordrun.model.options import TransformerConfig

A, B = "lora_a", "lora_b"
"""Names of the two matrices, (rank, inputs) and (outputs, rank), beside the layer's weight."""
HF = "hf:"
"""Begins the name of a model in Hugging Face's format."""
DIGEST = "2:"
"""Prefix of a checksum of all tensors. Up to 0.1, checksums covered only 1-d tensors, which some models lack."""
DIGEST_VALUES = 2**18
"""Approximate number of values of each tensor in the checksum, in evenly spaced rows. So it takes only seconds for
large models, and does not read all pages of a mapped file."""


class Adapted(nn.Linear):
    """A linear layer with an adapter: a product of two matrices of low rank, added to its weight."""

    def __init__(self, layer: nn.Linear, cfg: TransformerConfig) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.scale, self.drop = cfg.lora_alpha / cfg.lora_rank, Dropout(cfg.lora_dropout)
        self.lora_a = nn.Parameter(torch.empty(cfg.lora_rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.empty(layer.out_features, cfg.lora_rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's, which is 0 at first."""
        return super().forward(x) + self.scale * F.linear(F.linear(self.drop(x), self.lora_a), self.lora_b)


def adapt(model: Model, cfg: TransformerConfig) -> None:
    """Freeze ``model``, and give the layers ``cfg.lora_targets`` of its blocks adapters.

    Raises:
        ConfigError: a block has no linear layer of this name.
    """
    for block in model.blocks.values():
        layers = {name: each for name, each in block.named_modules() if isinstance(each, nn.Linear)}
        for name in cfg.lora_targets or layers:
            if name not in layers:
                raise ConfigError(
                    f"model.lora_targets={cfg.lora_targets}: model={cfg.name} has no {name}; its layers are "
                    f"{', '.join(layers)}",
                    page="finetune.md#lora",
                )
            block.set_submodule(name, Adapted(layers[name], cfg))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    """Return whether the parameter ``name`` belongs to an adapter."""
    return name.endswith((A, B))


def without(cfg: TransformerConfig) -> TransformerConfig:
    """Return the options of the model without adapters."""
    return replace(cfg, lora_rank=0)


def merged(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], cfg: TransformerConfig) -> Mapping[str, Tensor]:
    """Return the weights of ``base`` with the adapters in them, each computed in fp32 when it is read."""

    def read(name: str) -> Tensor:
        a, b = (f"{name.removesuffix('weight')}{part}" for part in (A, B))
        if a not in adapters:
            return base[name]
        return base[name].float() + cfg.lora_alpha / cfg.lora_rank * (adapters[b] @ adapters[a])

    return LazyWeights({name: partial(read, name) for name in base})


def digest(base: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return a checksum that identifies the ``base`` weights of ``model``, from rows of each tensor."""
    found = xxhash.xxh3_64()
    for name, _ in model.named_parameters():
        tensor = base[name]
        if tensor.dim() > 1:
            rows = tensor.flatten(0, -2)
            tensor = rows[:: max(1, rows.numel() // DIGEST_VALUES)]
        found.update(tensor.float().contiguous().numpy().data)
    return DIGEST + found.hexdigest()


def digest_like(stored: str, base: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return a checksum of ``base`` of the same kind as ``stored``, which may be that of an older checkpoint."""
    if stored.startswith(DIGEST):
        return digest(base, model)
    found = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            found.update(base[name].float().numpy().tobytes())
    return found.hexdigest()


def base_source(cfg: Config, stored: Mapping[str, Any]) -> str | None:
    """Return where a run with ``cfg`` reads its initial weights: train.init_from or, for LoRA, the known base model.

    A LoRA run that is resumed with the same train.init_from uses the base checkpoint that it began with, even if the
    base run has newer ones by now.

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


def describe_base(
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
        same = known is None or digest_like(known["digest"], weights, model) == known["digest"]
        found = [digest(weights, model), same]
    checksum, same = dist.broadcast(found, world)
    if known and not same:
        raise ConfigError(
            f"train.init_from={cfg.train.init_from}: {source} has other weights than {known['source']} had when the "
            f"adapters in the checkpoint began to train: use train.init_from={known['source']} with its original "
            "weights, or a copy of them"
        )
    return {"source": source, "digest": checksum}
