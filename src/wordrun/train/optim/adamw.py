"""Optimizers: each is made from its options and the named parameters, and has a line in ``wordrun.config.parts``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw as adamw_step

from wordrun.backend.sharded_tensors import local
from wordrun.dist import torch_private
from wordrun.train.optim.options import AdamWConfig, LionConfig, OptimizerConfig, SGDConfig

Named = Iterable[tuple[str, Parameter]]


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose step computes with this rank's shards of parameters, gradients and means.

    The results are the same to the bit. For sharded tensors, torch works out for each operation how the result is
    sharded, which takes longer than the step of a small shard.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], fused: bool) -> None:
        super().__init__(groups, lr=lr, betas=betas, fused=fused)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step; ``closure`` is not used."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p, group) for p in parameters]
            adamw_step(
                [local(p) for p in parameters],
                [local(sharded_as(p, p.grad)) for p in parameters],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),  # torch's GradScaler sets both
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of ``parameter``, the same as torch's."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def sharded_as(parameter: Tensor, gradient: Any) -> Any:
    """Return the ``gradient`` of ``parameter`` sharded like it; one that is still to be summed over ranks is summed."""
    if (
        torch_private.is_sharded(parameter)
        and torch_private.is_sharded(gradient)
        and gradient.placements != parameter.placements
    ):
        return gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def adamw(cfg: AdamWConfig, parameters: Named) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) over ``parameters``, fused if the device supports it."""
    groups = decay_groups(cfg, parameters)
    fused = all(torch_private.has_fused_adamw(p.device) for group in groups for p in group["params"])
    return AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=fused)


def sgd(cfg: SGDConfig, parameters: Named) -> torch.optim.Optimizer:
    """Return stochastic gradient descent over ``parameters``; the weight decay is added to the gradients."""
    groups = decay_groups(cfg, parameters)
    return torch.optim.SGD(groups, lr=cfg.learning_rate, momentum=cfg.momentum, nesterov=cfg.nesterov)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): steps by the sign of a mean of the gradients."""

    def __init__(self, cfg: LionConfig, parameters: Named) -> None:
        self.beta1, self.beta2 = cfg.beta1, cfg.beta2
        super().__init__(decay_groups(cfg, parameters), {"lr": cfg.learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step; ``closure`` is not used."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                direction = mean.lerp(p.grad, 1 - self.beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                mean.lerp_(p.grad, 1 - self.beta2)


def decay_groups(cfg: OptimizerConfig, parameters: Named) -> list[dict[str, Any]]:
    """Return groups of parameters: matrices, with weight decay, and vectors, without.

    Experts on other ranks are a third group: with torch 2.8, foreach operations need all tensors on the same mesh.
    """
    parameters = list(parameters)
    experts = [p for _, p in parameters if "ep" in torch_private.mesh_axes(p)]
    matrices = [p for _, p in parameters if p.dim() >= 2 and "ep" not in torch_private.mesh_axes(p)]
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": [p for _, p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [*groups, {"params": experts, "weight_decay": cfg.weight_decay}] if experts else groups
