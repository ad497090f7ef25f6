"""Muon (Jordan et al. 2024) for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wordrun import compat
from wordrun.backend.native import local
from wordrun.backend.optimizer import NamedParameters
from wordrun.config import MuonConfig
from wordrun.model.base import Rows
from wordrun.train.optim import Named, decay_groups
from wordrun.train.orthogonal import divided, joined, orthogonalized


class Muon(torch.optim.Optimizer):
    """Steps hidden matrices by an orthogonalized mean of their gradients, and all other parameters by AdamW.

    ``NamedParameters`` say which are hidden matrices; in other ``parameters``, all of two or more dimensions are.
    """

    def __init__(self, cfg: MuonConfig, parameters: Named) -> None:
        self.cfg = cfg
        parameters = parameters if isinstance(parameters, NamedParameters) else NamedParameters(parameters)
        hidden = [(p, parameters.matrices[name]) for name, p in parameters if name in parameters.matrices]
        self.rows = [rows_for(cfg.split, rows) for _, rows in hidden]
        rest = [(name, p) for name, p in parameters if name not in parameters.matrices]
        groups = decay_groups(cfg.adamw_weight_decay, rest)
        self.adamw = torch.optim.AdamW(
            groups, lr=cfg.adamw_lr or cfg.learning_rate, betas=(cfg.beta1, cfg.beta2),
            fused=all(compat.has_fused_adamw(p.device) for _, p in rest),
        )  # fmt: skip
        matrices = {"params": [p for p, _ in hidden], "weight_decay": cfg.weight_decay}
        super().__init__([matrices, *self.adamw.param_groups], {"lr": cfg.learning_rate})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state that is loaded, for AdamW too."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let AdamW work on the groups after the first, with this optimizer's state."""
        self.adamw.state, self.adamw.param_groups = self.state, self.param_groups[1:]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step; ``closure`` is not used."""
        self.adamw.step()
        group = self.param_groups[0]
        chosen = [(p, rows) for p, rows in zip(group["params"], self.rows, strict=True) if p.grad is not None]
        if not chosen:
            return
        parameters = [p for p, _ in chosen]
        wholes = self._orthogonal(self._directions(parameters), [rows for _, rows in chosen])
        for p, direction in zip(parameters, wholes, strict=True):
            update(local(p), direction, group["lr"], step_factor(self.cfg.scale, p.shape), group["weight_decay"],
                   cautious=self.cfg.cautious)  # fmt: skip

    def _directions(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Update the running means of the gradients; return what will be orthogonalized, like the parameters."""
        states = [self.state[p] for p in parameters]
        step = 1 + max(state.get("step", 0) for state in states)
        momentum = momentum_at(self.cfg, step)
        for p, state in zip(parameters, states, strict=True):
            state.setdefault("mean", torch.zeros_like(p))
            state["step"] = step
        gradients, means = [local(p.grad) for p in parameters], [local(state["mean"]) for state in states]
        compat.move_towards(means, gradients, 1 - momentum)
        if not self.cfg.nesterov:
            return means
        return [gradient.lerp(mean, momentum) for gradient, mean in zip(gradients, means, strict=True)]

    def _orthogonal(self, directions: Sequence[Tensor], rows: Sequence[Rows]) -> list[Tensor]:
        """Return the orthogonalized ``directions``."""
        dtype = compute_dtype(self.cfg.precision, directions[0].device)
        stacks = [divided(each.to(dtype), at) for each, at in zip(directions, rows, strict=True)]
        done = iter(orthogonalized([matrix for stack in stacks for matrix in stack], iterations(self.cfg)))
        return [
            joined(torch.stack([next(done) for _ in stack]), at, each.shape)
            for stack, at, each in zip(stacks, rows, directions, strict=True)
        ]


def update(p: Tensor, direction: Tensor, rate: float, factor: float, decay: float, *, cautious: bool) -> None:
    """Step ``p`` against ``direction``, with decoupled weight decay; if ``cautious``, of weights that shrink anyway."""
    if cautious and decay:
        p.addcmul_(p, (p * direction > 0).to(p.dtype), value=-rate * decay)
    else:
        p.mul_(1 - rate * decay)
    p.sub_(direction.to(p.dtype), alpha=rate * factor)


def step_factor(scale: str, shape: Sequence[int]) -> float:
    """Return the factor of the steps of a matrix; for "adamw", see Liu et al. 2025."""
    n, m = shape[0], math.prod(shape[1:])
    return 0.2 * math.sqrt(max(n, m)) if scale == "adamw" else math.sqrt(max(1.0, n / m))


def momentum_at(cfg: MuonConfig, step: int) -> float:
    """Return the momentum of ``step``, which counts from 1: a function of the step alone, so that resuming is exact."""
    warm = min(1.0, (step - 1) / cfg.momentum_warmup) if cfg.momentum_warmup else 1.0
    return cfg.momentum_start + (cfg.momentum - cfg.momentum_start) * warm


def iterations(cfg: MuonConfig) -> list[tuple[float, float, float]]:
    """Return the coefficients of each Newton-Schulz iteration."""
    triples = list(zip(*[iter(cfg.ns_coefficients)] * 3, strict=True))
    return triples if len(triples) == cfg.ns_steps else triples * cfg.ns_steps


def rows_for(split: str, rows: Rows) -> Rows:
    """Return how a matrix is divided under the option ``split``."""
    return {"qkv": rows, "heads": Rows(1, rows.heads * rows.kinds), "none": Rows()}[split]


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the iterations: on CPUs, bf16 products are slow or, without instructions, hopeless."""
    fast = device.type != "cpu" if precision == "auto" else precision == "bf16"
    return torch.bfloat16 if fast else torch.float32
