"""Mixture of experts: LLaMA's blocks with many MLPs, of which a router chooses a few for each token.

Experts have no capacity limit, so that no token is dropped: tokens are sorted by expert, however many each gets.

Shapes: B sequences, T tokens, N = B T, C = n_embd, E experts, K = n_active experts per token, H = n_hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.dist import torch_private
from wordrun.model.base import Rows
from wordrun.model.block import Block
from wordrun.model.context_parallel import Context
from wordrun.model.dropout import Dropout
from wordrun.model.expert_parallel import Exchange, rows_of_rank
from wordrun.model.language_model import TokenBatch
from wordrun.model.llama import MLP, Attention, Llama
from wordrun.model.options import MoEConfig

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}
)
"""How the router's outputs become scores, by the names that model.router takes."""


class SharedState:
    """What the blocks of a model share: the gradient of the losses, and the ranks that hold the sequences."""

    gradient: Tensor | None = None
    """The gradient of the losses (B,) of the batch whose backward pass is running; None: they are averaged."""
    context: Context | None = None
    """The ranks among which each sequence is divided; None: it is not."""

    def __init__(self) -> None:
        self.routed = MoE.routed
        """``MoE.routed``, perhaps excluded from compilation; the same for all blocks, which share compiled code."""

    def divide_sequences(self, context: Context) -> None:
        """Balance the loads of sequences that are divided among the ranks of ``context``."""
        self.context = context

    def set_gradient(self, gradient: Tensor) -> None:
        """Remember the gradient of the losses, (B,), for the backward passes of the blocks."""
        self.gradient = gradient

    def leave_uncompiled(self) -> None:
        """Leave ``routed`` as it is in a compiled model."""
        if self.routed is MoE.routed:  # else it is already
            self.routed = torch.compiler.disable(MoE.routed)  # type: ignore[no-untyped-call]


class _Counted(torch.autograd.Function):
    """Returns the router's matrix; its backward pass adds what the forward pass has counted to a total.

    Only the backward pass happens exactly once for each micro-batch: the forward pass runs twice with activation
    checkpointing and also in evaluations, and pipelines run both passes once more to learn shapes, but without the
    gradients of weights.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: Tensor, found: list[Tensor]) -> Tensor:
        """Return ``weight``; ``found`` will be what this forward pass has counted, (E,) like ``total``."""
        ctx.total, ctx.found = total, found
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient."""
        ctx.total.add_(ctx.found[0])
        return gradients[0], None, None


class _Balanced(torch.autograd.Function):
    """Returns its first argument; its backward pass adds the gradient of the balance loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, balance: Tensor, shared_state: SharedState) -> Tensor:
        """Return ``weights``; ``balance`` (B,) is the balance loss of each sequence."""
        ctx.shared_state, ctx.shape = shared_state, balance.shape
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of both; the balance loss of a sequence has the gradient of the sequence's loss."""
        gradient = ctx.shared_state.gradient
        if gradient is None:  # in a pipeline, only the last stage has the losses
            gradient = gradients[0].new_full(ctx.shape, 1 / ctx.shape[0])
        return gradients[0], gradient, None


class Router(nn.Module):
    """Chooses the experts of each token by its scores, in fp32.

    A bias for each expert is added to the scores to choose, but not to weight the experts (Wang et al. 2024). It moves
    by a fixed step after each optimizer step: up for experts with less than the mean load, down for the others.
    """

    bias: Tensor
    counts: Tensor

    def __init__(self, cfg: MoEConfig, shared_state: SharedState) -> None:
        super().__init__()
        self.cfg, self.shared_state = cfg, shared_state
        self.weight = nn.Parameter(torch.empty(cfg.n_experts, cfg.n_embd))
        self.register_buffer("bias", torch.empty(cfg.n_experts, dtype=torch.float32))
        self.register_buffer("counts", torch.empty(cfg.n_experts, dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        """Start with equal biases."""
        self.bias.zero_()
        self.counts.zero_()

    def balance(self, load: Tensor) -> None:
        """Move the biases by the tokens that the experts got in a step on all ranks, ``load`` (E,), and count anew."""
        self.bias += self.cfg.balance_rate * torch.sign(load.mean() - load).float()
        self.counts.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and the numbers of the experts of each token of ``x`` (B, T, C), both (B, T, K), and how
        many tokens each expert gets, (E,)."""
        cfg, weight, counted = self.cfg, self.weight, list[Tensor]()
        with torch.autocast(x.device.type, enabled=False):
            if self.training and torch.is_grad_enabled():
                weight = _Counted.apply(weight, self.counts, counted)  # type: ignore[no-untyped-call]
            scores = SCORES[cfg.router](F.linear(x.float(), weight.float()))
            chosen = (scores.detach() + self.bias).topk(cfg.n_active).indices
            weights = scores.gather(-1, chosen)
            if cfg.normalize_weights:
                weights = weights / weights.sum(-1, keepdim=True)
            # Ones are added rather than counted: bincount would wait for an accelerator.
            flat = chosen.flatten(1)
            each = torch.zeros(len(x), cfg.n_experts, dtype=torch.int64, device=x.device)
            each.scatter_add_(1, flat, torch.ones_like(flat))
            counts = each.sum(0)
            counted.append(counts)
            if cfg.balance_loss and self.training:
                balance = self._balance(scores, each)
                weights = _Balanced.apply(weights, balance, self.shared_state)  # type: ignore[no-untyped-call]
        return weights, chosen, counts

    def _balance(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return the balance loss of each sequence, (B,), which equals its coefficient if the load is balanced.

        DeepSeek-V3 (2024), section 2.1.2: the mean over the experts of load x mean score, both relative to their means.

        Args:
            scores: (B, T, E).
            counts: tokens of each expert, (B, E).
        """
        if self.shared_state.context:  # gradients of other ranks' scores are computed on those ranks
            counts = self.shared_state.context.mean(counts.float())
        load = counts / counts.float().mean(-1, keepdim=True)
        share = (scores / scores.sum(-1, keepdim=True)).mean(1)
        return self.cfg.balance_loss * (load * share).sum(-1)


class Experts(nn.Module):
    """E MLPs like LLaMA's. Each layer holds the matrices of all experts, concatenated by rows, which ranks can shard.

    With expert parallelism, a rank has consecutive experts, and ``exchange`` sends tokens to and from other ranks.
    """

    exchange: Exchange | None = None

    def __init__(self, cfg: MoEConfig) -> None:
        super().__init__()
        self.n_hidden, self.n_embd = cfg.n_hidden, cfg.n_embd
        self.gate = nn.Linear(cfg.n_embd, cfg.n_experts * cfg.n_hidden, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.n_experts * cfg.n_hidden, bias=False)
        self.proj = nn.Linear(cfg.n_hidden, cfg.n_experts * cfg.n_embd, bias=False)

    def divide_experts(self, exchange: Exchange) -> None:
        """Work on the tokens of all ranks of ``exchange`` for this rank's experts."""
        self.exchange = exchange

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of the experts for their tokens, (N, C).

        Args:
            x: the tokens of the first expert, then those of the second, and so on: (N, C).
            counts: how many of them each of this rank's experts has.
        """
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ranks = self.exchange.size if self.exchange else 1
        layers = (self.gate, self.up, self.proj)
        gate, up, proj = (rows_of_rank(layer.weight, ranks).to(dtype) for layer in layers)
        product = torch_private.grouped_product(x, self.n_hidden, dtype)
        x = x.to(dtype)
        hidden = F.silu(product(x, gate.view(-1, self.n_hidden, self.n_embd), counts))
        hidden = hidden * product(x, up.view(-1, self.n_hidden, self.n_embd), counts)
        return product(hidden, proj.view(-1, self.n_embd, self.n_hidden), counts)


class MoE(nn.Module):
    """The weighted sum of each token's experts, and of those that all tokens share."""

    def __init__(self, cfg: MoEConfig, shared_state: SharedState) -> None:
        super().__init__()
        self.shared_state, self.router, self.experts = shared_state, Router(cfg, shared_state), Experts(cfg)
        self.shared = None
        if cfg.n_shared:
            self.shared = MLP(replace(cfg, n_hidden=cfg.n_shared * cfg.n_hidden, dropout=0.0))
        self.drop = Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token independently; ``x`` and the result are (B, T, C)."""
        y = self.shared_state.routed(self, x)
        return self.drop(y if self.shared is None else y + self.shared(x))  # type: ignore[no-any-return]

    def leave_uncompiled(self) -> None:
        """Compile without ``routed``: sorting takes little time, and the numbers of tokens differ in each step."""
        self.shared_state.leave_uncompiled()

    def routed(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the experts that the router chooses, (B, T, C)."""
        weights, chosen, counts = self.router(x)
        K = chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)
        tokens = x.flatten(0, 1).index_select(0, order // K)
        exchange = self.experts.exchange
        y = exchange(self.experts, tokens, counts) if exchange else self.experts(tokens, counts)
        y = y.index_select(0, order.argsort()).view(-1, K, y.shape[-1])
        return torch.bmm(weights.view(-1, 1, K).to(y.dtype), y).view_as(x).to(x.dtype)


class MixtureOfExperts(Llama):
    """LLaMA with a mixture of experts in place of each MLP: without shared experts Mixtral, with qk_norm Qwen3-MoE."""

    cfg: MoEConfig
    averages_buffers = False  # all ranks compute the same biases
    _loads: Tensor | None = None
    """How many tokens each expert got in the last step, on all ranks, (blocks, E)."""

    def new_block(self) -> Block:
        if "shared_state" not in vars(self):  # the constructor of Transformer calls this for each block
            self.shared_state = SharedState()
        return Block(self.new_norm(), Attention(self.cfg), self.new_norm(), MoE(self.cfg, self.shared_state))

    def divide_sequences(self, context: Context) -> None:
        """Train and evaluate on this rank's part of each sequence, and balance the loads of complete ones."""
        super().divide_sequences(context)
        self.shared_state.divide_sequences(context)

    @property
    def routers(self) -> list[Router]:
        """The routers of the blocks."""
        return [block.mlp.router for block in self.blocks.values()]  # type: ignore[union-attr,misc]

    def losses(self, batch: TokenBatch) -> Tensor:
        """Return the mean cross entropy of each sequence in nats per token, (B,).

        The balance loss is not part of it, but its gradient is.
        """
        losses = super().losses(batch)
        if self.cfg.balance_loss and losses.requires_grad:
            losses.register_hook(self.shared_state.set_gradient)  # type: ignore[no-untyped-call]
        return losses

    @torch.no_grad()
    def complete_step(self, add_up: Callable[[Tensor], None]) -> None:
        """Adjust the biases by the number of tokens that each expert got in the step, on all ranks."""
        routers = self.routers
        loads = torch.stack([router.counts for router in routers])
        add_up(loads)
        for router, load in zip(routers, loads.double(), strict=True):
            router.balance(load)
        self._loads = loads

    def loads(self) -> Tensor | None:
        """Return the load of each expert in the last step relative to the mean of its block, (blocks, E)."""
        if self._loads is None:
            return None
        loads = torch.zeros(self.cfg.n_layer, self.cfg.n_experts, device=self._loads.device)
        loads[list(self.layers)] = self._loads / self._loads.float().mean(1, keepdim=True)
        return loads

    def matrices(self) -> dict[str, Rows]:
        """Return the hidden matrices of the blocks: each expert's matrices count separately, the router's do not."""
        found = {name: rows for name, rows in super().matrices().items() if not name.endswith("router.weight")}
        experts = Rows(kinds=self.cfg.n_experts, apart=True)
        return {name: experts if ".experts." in name else rows for name, rows in found.items()}

    def flops_per_token(self) -> int:
        """Return the floating-point operations of one token's forward and backward pass: those of its experts only."""
        router = self.cfg.n_layer * self.cfg.n_embd * self.cfg.n_experts
        return super().flops_per_token() + 6 * (router - self._idle())

    def num_active_parameters(self) -> int:
        """Return the number of parameters that each token uses."""
        return self.num_parameters() - self._idle()

    def _idle(self) -> int:
        """Return the number of parameters of the experts that a token does not use."""
        cfg = self.cfg
        return cfg.n_layer * 3 * cfg.n_embd * cfg.n_hidden * (cfg.n_experts - cfg.n_active)
