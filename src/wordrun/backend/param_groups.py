"""Parameter groups of any torch optimizer: named parameters, a check for those left out, and learning rates."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wordrun.common.errors import ConfigError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.dist.collectives import all_max, all_rows, gather_json
from wordrun.dist.mesh import Layout
from wordrun.model.base import Rows

Named = Iterable[tuple[str, nn.Parameter]]
"""Parameters with their names in the full model."""


class NamedParameters(list[tuple[str, nn.Parameter]]):
    """A model's trained parameters by name, with facts that an optimizer may need.

    Args:
        parameters: this rank's parameters, or its shards of them.
        matrices: the hidden matrices among them, as from ``Model.matrices``; None: all of two or more dimensions.
        group: the process group whose ranks hold the shards of the same parameters, or copies; None: this rank alone.
        device: where the group communicates; None: where the parameters are.
        layout: how the ranks divide the parameters.
    """

    def __init__(
        self,
        parameters: Named,
        matrices: Mapping[str, Rows] | None = None,
        group: Any = None,
        device: torch.device | None = None,
        layout: Layout | None = None,
    ) -> None:
        super().__init__(parameters)
        self.matrices = {name: Rows() for name, p in self if p.dim() >= 2} if matrices is None else matrices
        self.group, self.device, self.layout = group, device, layout or Layout()


def require_same_order(parameters: Named, part: str, layout: Layout, device: torch.device) -> None:
    """Raise a ConfigError if ranks that compute the same layers have registered different parameters of the model.

    All ranks must call this. Gradients are averaged by the position of a parameter, not by its name.

    Args:
        parameters: this rank's.
        part: what the message calls the model.
        layout: how the ranks divide the model.
        device: where the ranks communicate.
    """
    names = [name for name, _ in parameters]
    digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
    digests = all_rows(torch.tensor([digest], device=device))[:, 0].tolist()
    first: dict[int, int] = {}  # the first rank of each stage
    for rank, other in enumerate(digests):
        at = first.setdefault(layout.index(rank, "pp"), rank)
        if other != digests[at]:
            found = gather_json(names, device)
            pairs = enumerate(zip_longest(found[at], found[rank]))
            number, (theirs, ours) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"{part} has different parameters on different ranks, whose gradients would be mixed up: number "
                f"{number + 1} is {theirs} on rank {at} and {ours} on rank {rank}; register modules in a fixed order, "
                "such as that of a sorted list instead of a set"
            )


def require_optimizer(found: Any, part: str) -> None:
    """Raise a ConfigError unless what the code of ``part`` returned is one optimizer that needs no closure."""
    if not hasattr(found, "param_groups"):
        raise ConfigError(
            f"{part} should return one torch optimizer, not {type(found).__name__}; a schedule is a separate part",
            page="extend/optimizer.md#an-optimizer",
        )
    needed = [p for p in inspect.signature(found.step).parameters.values() if p.default is p.empty and p.kind < 2]
    if needed:
        raise ConfigError(
            f"{part}: {type(found).__name__}.step needs a {needed[0].name}, and steps with closures are not supported: "
            "use an optimizer whose step() takes none"
        )


def left_out(optimizer: Optimizer, parameters: Named) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable ``parameters`` that are in no group of ``optimizer``."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in parameters if p.requires_grad and p not in known]


def warn_of_left_out(optimizer: Optimizer, parameters: Named, part: str, *, everywhere: torch.device | None) -> None:
    """Warn of trainable ``parameters`` that are in no group of ``optimizer``, once for all ranks.

    Args:
        optimizer: the optimizer of ``part``.
        parameters: this rank's.
        part: what the warning calls it.
        everywhere: if pipeline stages have different parameters, the device for gathering those of all ranks.
    """
    parameters = list(parameters)
    names = [name for name, p in parameters if p.requires_grad]
    out = [name for name, _ in left_out(optimizer, parameters)]
    if everywhere is not None and all_max(torch.tensor(len(out), device=everywhere)):
        found = gather_json([names, out], everywhere)
        names, out = ([name for each in found for name in each[kind]] for kind in (0, 1))
    if out := [*dict.fromkeys(out)]:
        shown = ", ".join(out[:3]) + ", ..." * (len(out) > 3)
        LOGGER.warning(
            "%s leaves out %d of %d trainable parameters: %s (set requires_grad=False if that is intended)",
            part,
            len(out),
            len({*names}),
            shown,
            extra=FIRST_RANK,
        )


def scale_rates(optimizer: Optimizer, hidden: set[nn.Parameter], factors: tuple[float, float]) -> None:
    """Multiply the learning rates of ``hidden`` matrices and of all other parameters by ``factors``, for muP.

    Groups that have both are split. The product of learning rate and weight decay stays as it is: how fast unused
    weights shrink should not depend on the width.
    """
    for group in list(optimizer.param_groups):
        rest = [p for p in group["params"] if p not in hidden]
        if rest and len(rest) < len(group["params"]):
            among = [p for p in group["params"] if p in hidden]
            group["params"] = rest
            optimizer.add_param_group({**group, "params": among})
    for group in optimizer.param_groups:
        factor = factors[0] if hidden.issuperset(group["params"]) else factors[1]
        group["lr"] *= factor
        group["weight_decay"] = group.get("weight_decay", 0.0) / factor


def remember_ratios(optimizer: Optimizer, learning_rate: float) -> Optimizer:
    """Store in each parameter group its learning rate relative to ``learning_rate``; return ``optimizer``."""
    for group in optimizer.param_groups:
        group["lr_ratio"] = group["lr"] / learning_rate
    return optimizer


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of this step; the parameter groups keep their ratios."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_ratio"]
