"""Muon (Jordan et al. 2024) for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wordrun.backend.param_groups import Named, NamedParameters
from wordrun.backend.sharded_tensors import local
from wordrun.checkpoint.shards import sharding_of
from wordrun.dist import torch_private
from wordrun.model.base import Rows
from wordrun.train.optim.adamw import AdamW
from wordrun.train.optim.muon_assignment import Assignment, assign
from wordrun.train.optim.options import MuonConfig
from wordrun.train.optim.weight_decay import decay_groups


class MatrixGroup(NamedTuple):
    """Hidden matrices that are assigned to the ranks of one process group."""

    items: list[int]
    """Indices of the matrices among those with a gradient."""
    rows: list[Rows]
    """How the rows of each are divided into matrices."""
    assignment: Assignment


class Muon(torch.optim.Optimizer):
    """Steps hidden matrices by an orthogonalized mean of their gradients, and all other parameters by AdamW.

    ``NamedParameters`` say which are hidden matrices; in other ``parameters``, all of two or more dimensions are.
    """

    def __init__(self, cfg: MuonConfig, parameters: Named) -> None:
        parameters = parameters if isinstance(parameters, NamedParameters) else NamedParameters(parameters)
        self.cfg, self.group, self.device, self.layout = cfg, parameters.group, parameters.device, parameters.layout
        self._groups: dict[tuple[int, ...], list[MatrixGroup]] = {}
        hidden = [(p, parameters.matrices[name]) for name, p in parameters if name in parameters.matrices]
        self.rows = [rows_for(cfg.split, rows) for _, rows in hidden]
        rest = [(name, p) for name, p in parameters if name not in parameters.matrices]
        groups = decay_groups(replace(cfg, weight_decay=cfg.adamw_weight_decay), rest)
        self.adamw = AdamW(
            groups,
            lr=cfg.adamw_lr or cfg.learning_rate,
            betas=(cfg.beta1, cfg.beta2),
            fused=all(torch_private.has_fused_adamw(p.device) for _, p in rest),
        )
        matrices = {"params": [p for p, _ in hidden], "weight_decay": cfg.weight_decay}
        super().__init__([matrices, *self.adamw.param_groups], {"lr": cfg.learning_rate})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use the loaded state for AdamW, too."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let AdamW work on the groups after the first, with this optimizer's state."""
        groups = self.param_groups[1:]
        self.adamw.__setstate__({"state": self.state, "param_groups": groups})  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step; ``closure`` is not used."""
        chosen = tuple(item for item, p in enumerate(self.param_groups[0]["params"]) if p.grad is not None)
        parameters = [self.param_groups[0]["params"][item] for item in chosen]
        if not parameters:
            self.adamw.step()
            return
        rows = [self.rows[item] for item in chosen]
        if chosen not in self._groups:
            self._groups[chosen] = self._assign(parameters, rows)
        directions = self._directions(parameters)
        for number, matrices in enumerate(self._groups[chosen]):
            some = [[each[item] for item in matrices.items] for each in (parameters, directions)]
            self._step_group(matrices, *some, with_adamw=number == 0)

    def _step_group(
        self, matrices: MatrixGroup, parameters: Sequence[Tensor], directions: Sequence[Tensor], *, with_adamw: bool
    ) -> None:
        """Step ``parameters`` by their orthogonalized ``directions``; AdamW's step overlaps the first exchange."""
        assignment, rows = matrices.assignment, matrices.rows
        directions = [each.to(assignment.device, assignment.dtype) for each in directions]
        gathering = assignment.to_owners(0, directions)
        if with_adamw:
            self.adamw.step()
        under_way: list[Callable[[], dict[int, Tensor]]] = []
        for bucket in range(len(assignment.routes)):
            complete = gathering()
            if bucket + 1 < len(assignment.routes):
                gathering = assignment.to_owners(bucket + 1, directions)
            under_way.append(assignment.from_owners(bucket, self._orthogonal(complete, rows)))
            if bucket:  # meanwhile, the results of the current bucket are in transit
                self._update(matrices, parameters, under_way.pop(0)())
        self._update(matrices, parameters, under_way.pop()())

    def _assign(self, parameters: Sequence[Tensor], rows: Sequence[Rows]) -> list[MatrixGroup]:
        """Divide the work on ``parameters`` among the ranks that hold them.

        The work on an expert is divided among the ranks that have it.
        """
        device, at = self.device or parameters[0].device, self.layout
        dtype = compute_dtype(self.cfg.precision, device)
        numbers: dict[bool, list[int]] = {}
        for item, p in enumerate(parameters):
            numbers.setdefault("ep" in torch_private.mesh_axes(p), []).append(item)
        found = []
        for is_expert, items in numbers.items():
            shardings, group = [sharding_of(parameters[item], at) for item in items], self.group
            kinds = [rows[item] for item in items]
            if is_expert:
                mesh: Any = parameters[items[0]].device_mesh  # type: ignore[attr-defined]
                group = mesh.get_group("expert_shard") if at.expert_shard > 1 else None
                shardings = [sharding.first_shard() for sharding in shardings]
                kinds = [replace(each, kinds=each.kinds // at.ep) for each in kinds]
            costs = [cost(sharding.shape, each) for sharding, each in zip(shardings, kinds, strict=True)]
            found.append(MatrixGroup(items, kinds, assign(shardings, costs, group, dtype, device)))
        return found

    def _update(self, matrices: MatrixGroup, parameters: Sequence[Tensor], directions: Mapping[int, Tensor]) -> None:
        """Step those of the ``parameters`` that have ``directions``, by number."""
        group = self.param_groups[0]
        for item, direction in directions.items():
            p = parameters[item]
            factor = step_factor(self.cfg.scale, matrices.assignment.shapes[item], matrices.rows[item])
            update(local(p), direction, group["lr"], factor, group["weight_decay"], cautious=self.cfg.cautious)

    def _directions(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Update the running means of the gradients; return what will be orthogonalized, like the parameters."""
        states = [self.state[p] for p in parameters]
        step = 1 + max(state.get("step", 0) for state in states)
        momentum = momentum_at(self.cfg, step)
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state["mean"] = torch.zeros_like(p)
            state["step"] = step
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        means = [local(state["mean"]) for state in states]
        torch_private.move_towards(means, gradients, 1 - momentum)
        if not self.cfg.nesterov:
            return means
        return [gradient.lerp(mean, momentum) for gradient, mean in zip(gradients, means, strict=True)]

    def _orthogonal(self, complete: dict[int, Tensor], rows: Sequence[Rows]) -> dict[int, Tensor]:
        """Return the orthogonalized ``complete`` matrices, by the number of their parameter."""
        stacks = {item: divided(each, rows[item]) for item, each in complete.items()}
        done = iter(orthogonalized([matrix for stack in stacks.values() for matrix in stack], iterations(self.cfg)))
        return {
            item: joined(torch.stack([next(done) for _ in stack]), rows[item], complete[item].shape)
            for item, stack in stacks.items()
        }


def update(p: Tensor, direction: Tensor, rate: float, factor: float, decay: float, *, cautious: bool) -> None:
    """Step ``p`` against ``direction``, with decoupled weight decay.

    If ``cautious``, only weights that the step makes smaller anyway are decayed.
    """
    direction = direction.to(p.device, p.dtype)
    if cautious and decay:
        p.addcmul_(p, (p * direction > 0).to(p.dtype), value=-rate * decay)
    else:
        p.mul_(1 - rate * decay)
    p.sub_(direction, alpha=rate * factor)


def step_factor(scale: str, shape: Sequence[int], rows: Rows) -> float:
    """Return the factor of the steps of the matrices in a parameter; for "adamw", see Liu et al. 2025."""
    n, m = shape[0] // rows.kinds, math.prod(shape[1:])
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
    if rows.apart:
        return rows
    return {"qkv": rows, "heads": Rows(1, rows.heads * rows.kinds), "none": Rows()}[split]


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the iterations: with auto fp32 on CPUs, where bf16 products are slow."""
    fast = device.type != "cpu" if precision == "auto" else precision == "bf16"
    return torch.bfloat16 if fast else torch.float32


Iteration = tuple[float, float, float]
"""Coefficients a, b, c of a X + b (X X') X + c (X X')^2 X."""


def orthogonalized(matrices: Sequence[Tensor], iterations: Sequence[Iteration]) -> list[Tensor]:
    """Return approximately U V' for each matrix U S V'. Matrices of equal shape, up to transposition, are batched.

    Args:
        matrices: each (n, m); their dtype is that of the computation.
        iterations: the coefficients of each iteration.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for number, matrix in enumerate(matrices):
        shapes.setdefault(tuple(sorted(matrix.shape)), []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in shapes.values():
        wide = [matrices[i] if matrices[i].shape[0] <= matrices[i].shape[1] else matrices[i].mT for i in numbers]
        done = newton_schulz(torch.stack(wide), iterations)
        found |= {i: x if x.shape == matrices[i].shape else x.mT for i, x in zip(numbers, done, strict=True)}
    return [found[i] for i in range(len(matrices))]


def newton_schulz(x: Tensor, iterations: Sequence[Iteration]) -> Tensor:
    """Return the matrices ``x`` (B, n, m), n at most m, with singular values near 1 (Jordan et al. 2024)."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.dtype == torch.float32 and x.shape[2] >= 2 * x.shape[1]:
        return _by_gram(x, iterations)
    for a, b, c in iterations:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram(x: Tensor, iterations: Sequence[Iteration]) -> Tensor:
    """Return the same as ``newton_schulz`` in half the time: all but two of the products are of n x n matrices.

    Each iteration multiplies X by a polynomial P of X X'. P commutes with X X', which becomes P X X' P. The squares in
    X X' cost half the digits of small singular values, which fp32 can spare and bf16 cannot.
    """
    gram, product = x @ x.mT, None
    for number, (a, b, c) in enumerate(iterations, start=1):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if number < len(iterations):
            gram = factor @ (factor @ gram)
    return x if product is None else product @ x


def divided(parameter: Tensor, rows: Rows) -> Tensor:
    """Return the matrices in ``parameter``, (kinds, heads * size, inputs), from rows ordered by head, then by kind."""
    flat = parameter.flatten(1)
    by_head = flat.view(rows.heads, rows.kinds, -1, flat.shape[1])
    return by_head.transpose(0, 1).reshape(rows.kinds, -1, flat.shape[1])


def joined(matrices: Tensor, rows: Rows, shape: torch.Size) -> Tensor:
    """Return the parameter of this ``shape`` from which ``divided`` made ``matrices``."""
    by_kind = matrices.view(rows.kinds, rows.heads, -1, matrices.shape[-1])
    return by_kind.transpose(0, 1).reshape(shape)


def cost(shape: Sequence[int], rows: Rows) -> float:
    """Return the number of operations of an iteration for a parameter of this ``shape``, divided by ``rows``."""
    n, m = sorted((shape[0] // rows.kinds, math.prod(shape[1:])))
    return rows.kinds * (4.0 * n * n * m + 2.0 * n**3)
