"""AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_step

from wordrun.backend.param_groups import Named
from wordrun.backend.sharded_tensors import local
from wordrun.dist import torch_private
from wordrun.train.optim.options import AdamWConfig
from wordrun.train.optim.weight_decay import decay_groups


class AdamW(torch.optim.AdamW):
    """torch's AdamW, but its step computes with this rank's local shards of parameters, gradients and means.

    The results are bitwise identical. With DTensors, torch derives the sharding of each operation's result, which takes
    longer than the step of a small shard.
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
    """Return the ``gradient`` of ``parameter``, sharded like it; partial sums are summed over ranks."""
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
