"""The weights of experts in Hugging Face's files: a matrix for each expert or, in some files, stacked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from wordrun.common.errors import UserError
from wordrun.model.base import LazyWeights

ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
"""The name of a matrix of one expert."""
STACKED = re.compile(r"(.+\.)mlp\.experts\.(gate_up|down)_proj")
"""The name of a tensor of all experts, (experts, rows, columns), the same in all models of transformers 5."""
BIAS = "router.bias"
"""Suffix of the name of a buffer that only our model has."""


def check_bias(bias: Tensor) -> None:
    """Check that a router's ``bias``, which transformers' models do not have, has no effect.

    Raises:
        UserError: it is not 0.
    """
    if not bias.is_meta and bias.any():
        raise UserError(
            "transformers' Mixtral and Qwen3-MoE have no router biases, which this model has because it was trained "
            "with model.balance_rate above 0: export it with form=checkpoint; for transformers, train with "
            "model.balance_rate=0 and model.balance_loss",
            page="experts.md#what-works-with-what",
        )


def split(name: str, matrices: Tensor, n_experts: int) -> dict[str, Tensor]:
    """Return each expert's matrix by its name in Hugging Face's files.

    Args:
        name: name of the matrices of all experts.
        matrices: these, (n_experts * rows, columns).
        n_experts: number of experts.
    """
    module, _, layer = name.partition(".experts.")
    each = matrices.view(n_experts, -1, matrices.shape[-1]).unbind()
    return {f"{module}.experts.{i}.{layer}": matrix.contiguous() for i, matrix in enumerate(each)}


def join(
    theirs: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], names: Mapping[str, str]
) -> tuple[Mapping[str, Tensor], dict[str, torch.Size]]:
    """Return transformers' weights and their shapes with the matrices of all experts of a layer concatenated by rows.

    Args:
        theirs: the weights.
        shapes: their shapes.
        names: our names of the modules of a block mapped to transformers'.
    """
    theirs, shapes = _unstacked(theirs, shapes, names)
    layers: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        if found := ONE_EXPERT.fullmatch(name):
            layers.setdefault(found[1] + found[3], []).append((int(found[2]), name))
    if not layers:
        return theirs, dict(shapes)
    every = {joined: [name for _, name in sorted(found)] for joined, found in layers.items()}
    rest = {name: shape for name, shape in shapes.items() if not ONE_EXPERT.fullmatch(name)}
    rows = {joined: sum(shapes[name][0] for name in some) for joined, some in every.items()}
    readers = {name: partial(theirs.__getitem__, name) for name in rest}
    joint = {joined: partial(_joined, theirs, some) for joined, some in every.items()}
    sizes = {joined: torch.Size((rows[joined], *shapes[some[0]][1:])) for joined, some in every.items()}
    return LazyWeights({**readers, **joint}), rest | sizes


def _joined(theirs: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return the tensors of these ``names``, concatenated by rows."""
    return torch.cat([theirs[name] for name in names])


def _unstacked(
    theirs: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], names: Mapping[str, str]
) -> tuple[Mapping[str, Tensor], dict[str, torch.Size]]:
    """Return ``theirs`` and ``shapes``; the tensors that transformers 5 stacks get the names and shapes of ``join``."""
    readers = {name: partial(theirs.__getitem__, name) for name in shapes}
    sizes = dict(shapes)
    for stacked, size in shapes.items():
        if not (found := STACKED.fullmatch(stacked)) or len(size) != 3:
            continue
        layers = ("gate", "up") if found[2] == "gate_up" else ("proj",)
        del readers[stacked], sizes[stacked]
        for part, layer in enumerate(layers):
            name = f"{found[1]}{names[f'mlp.experts.{layer}']}.weight"
            readers[name] = partial(_part, theirs, stacked, part, len(layers))
            sizes[name] = torch.Size((size[0] * size[1] // len(layers), size[2]))
        router = f"{found[1]}mlp.gate.weight"
        if router in readers:
            name = f"{found[1]}{names['mlp.router']}.weight"
            readers[name], sizes[name] = readers.pop(router), sizes.pop(router)
    return LazyWeights(readers), sizes


def _part(theirs: Mapping[str, Tensor], name: str, part: int, parts: int) -> Tensor:
    """Divide each expert's rows of the tensor ``name`` into ``parts``; return number ``part`` of all, joined."""
    return theirs[name].chunk(parts, dim=1)[part].flatten(0, 1)
