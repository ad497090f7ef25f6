"""Maximal update parametrization, muP (Yang et al. 2022, table 8), for transformers.

If the width is m times that of the base model, the initial standard deviation of hidden matrices is divided by sqrt(m),
the logits are divided by m, and attention is scaled by 1 / H rather than 1 / sqrt(H).
``backend.param_groups.scale_rates`` scales the learning rates. At the base width, nothing differs from the plain model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from wordrun.common.errors import ConfigError, UserError
from wordrun.model.base import LazyWeights
from wordrun.model.options import ModelConfig, TransformerConfig

FIELDS = ("mup", "mup_base_width", "mup_base_head_size")
"""The options of muP."""


def attention_scale(cfg: TransformerConfig) -> float | None:
    """Return the factor of attention's products: sqrt(H_base) / H for heads of H elements; None: 1 / sqrt(H)."""
    size = cfg.attention_width() / cfg.n_head
    return None if cfg.head_ratio() == 1 else 1 / math.sqrt(size * cfg.head_ratio())


def scales(cfg: ModelConfig) -> bool:
    """Return whether the model computes different outputs than the plain model with the same weights."""
    return _ratios(cfg) != (1, 1)


def _ratios(cfg: ModelConfig) -> tuple[float, float]:
    """Return the ratios that decide what the model computes; both are 1 without muP."""
    return cfg.width_ratio(), cfg.head_ratio()


def suited(weights: Mapping[str, Tensor], theirs: ModelConfig, ours: ModelConfig) -> Mapping[str, Tensor]:
    """Return ``weights`` of a model with the options ``theirs``, converted for a model of the same shape with ``ours``.

    Raises:
        ConfigError: ``ours`` uses muP, with other ratios; only weights for a plain model can be converted.
        UserError: there is no weight that a factor could be multiplied into.
    """
    if _ratios(theirs) == _ratios(ours):
        return weights
    if scales(ours):
        raise ConfigError(
            f"train.init_from: the weights are of a model with model.mup={str(scales(theirs)).lower()} or another base "
            "width, which computes different logits than model.mup=true here: use model.mup=false, or the model's own "
            "options",
            page="scaling_laws.md#mup-one-learning-rate-for-all-widths",
        )
    assert isinstance(theirs, TransformerConfig)
    return folded(weights, theirs)


def folded(weights: Mapping[str, Tensor], cfg: TransformerConfig) -> Mapping[str, Tensor]:
    """Return weights with which the plain model has the same outputs as ``cfg`` with ``weights``.

    The factor of the logits is multiplied into the final norm. The factor of attention is multiplied into the norm of
    the query heads if there is one, otherwise into the queries' matrix. Each weight is computed in fp32 when read.

    Raises:
        UserError: there is no weight that a factor could be multiplied into.
    """
    factor = 1 / math.sqrt(cfg.head_ratio())
    norms = getattr(cfg, "norm_weights", True)
    in_heads = getattr(cfg, "qk_norm", False)
    if not norms and (cfg.width_ratio() != 1 or (in_heads and factor != 1)):
        raise UserError(
            f"model={cfg.name} with model.mup=true and model.norm_weights=false has no weights that the factors of the "
            "logits and of attention could go into: export it with form=checkpoint; other forms need "
            "model.norm_weights=true"
        )

    def read(name: str) -> Tensor:
        weight, last = weights[name], name.removeprefix("blocks.").partition(".")[2]
        if name.startswith("norm."):
            return weight.float() / cfg.width_ratio()
        if not name.startswith("blocks.") or factor == 1:
            return weight
        if last.startswith("attention.qkv."):  # GPT's, ordered by head, then by q, k, v
            rows = weight.float().reshape(cfg.n_head, 3, -1).clone()
            rows[:, 0] *= factor
            return rows.view_as(weight)
        if last in (["attention.q_norm.weight"] if in_heads else ["attention.q.weight", "attention.q.bias"]):
            return weight.float() * factor
        return weight

    return LazyWeights({name: partial(read, name) for name in weights})
