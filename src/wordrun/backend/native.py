"""What the backends that use torch's own engines have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from wordrun.backend.base import Job, Save, StepResult
from wordrun.backend.precision import choose_dtype
from wordrun.backend.stopwatch import Stopwatch
from wordrun.checkpoint import pieces
from wordrun.config import Config
from wordrun.data.batch import Batch
from wordrun.errors import ConfigError
from wordrun.model import Transformer

# What selective activation checkpointing keeps: the dear ones.
PRODUCTS = (
    "mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip


class NativeBackend:
    """A step of micro-steps, and its end. What is parallel about it is in the subclasses."""

    def __init__(self, job: Job) -> None:
        self.device = torch.device(job.world.device)
        self.dtype = choose_dtype(job.cfg.train.dtype, self.device)
        self.layout, self.rank = job.layout, job.world.rank
        self.copies = pieces.HostCopies()
        self.parts = self.make_parts(job)
        self.parameters = [p for part in self.parts for p in part.parameters()]
        if job.weights is not None:
            self._fill(job.weights)
        self.optimizer = job.make_optimizer(self.parameters)
        self.grad_clip = job.cfg.optimizer.grad_clip or float("inf")
        # Only fp16 has too few exponent bits for small gradients; bf16 needs no scaling.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.skips = job.cfg.train.on_nonfinite == "skip"

    def make_parts(self, job: Job) -> list[Transformer]:
        """Return what this rank holds of the model, ready to train."""
        raise NotImplementedError

    def micro_step(self, batch: Batch, *, last: bool) -> Tensor:
        """Return the mean loss of ``batch``; with its backward pass go the gradients of the step, if it is the last."""
        raise NotImplementedError

    def train_step(self, batches: Sequence[Batch], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            loss = self.micro_step(batch, last=number == len(batches)) / len(batches)
            clock.lap("forward")
            self.backward(self.scaler.scale(loss))
            clock.lap("backward")
            losses.append(loss.detach())
        return StepResult(torch.stack(losses).sum(), self.update(learning_rate, clock))

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` up."""
        torch.autograd.backward(loss)

    def update(self, learning_rate: float, clock: Stopwatch) -> Tensor:
        """Clip, let the optimizer take its step, and return the norm of the gradients."""
        self.scaler.unscale_(self.optimizer)
        norm = self.total_norm()
        if self.skips and not norm.isfinite():  # which waits for an accelerator, at every step
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            return norm
        # On a CPU the norm is at hand, and most steps need no clipping; an accelerator would have to be waited for.
        if self.device.type != "cpu" or norm > self.grad_clip:
            self.clip(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        return norm

    def total_norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        return get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def clip(self, norm: Tensor) -> None:
        """Scale the gradients down to optimizer.grad_clip where their ``norm`` is above it."""
        clip_grads_with_norm_(self.parameters, self.grad_clip, norm)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sequence of ``batch``, (B,)."""
        with self.autocast():
            return self.parts[0](batch.tokens, batch.targets, documents=batch.documents)  # type: ignore[no-any-return]

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last of ``tokens``, (B, V)."""
        with self.autocast():
            return self.parts[0](tokens, at=-1)  # type: ignore[no-any-return]

    def autocast(self) -> torch.autocast:
        """Return the context in which whole parameters compute in ``dtype``."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def named_parameters(self, *, once: bool = False) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield this rank's parameters by their names in the whole model.

        Args:
            once: leave out a copy of what another rank has under the same name.
        """
        for part in self.parts:
            yield from part.named_parameters()

    def state(self, *, once: bool = False) -> dict[str, Tensor]:
        """Return parameters and optimizer state, this rank's pieces, by their names in a checkpoint."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters(once=once):
            state[f"model.{name}"] = parameter
            for key, value in self.optimizer.state[parameter].items():
                if value.dim():
                    state[f"optimizer.{name}.{key}"] = value
        return state

    def begin_save(self, own: Mapping[str, Tensor]) -> Save:
        """Copy what this rank writes of the state to the host's memory."""
        self._prime()
        mine = pieces.mine_to_write(self.state(once=True), self.layout, self.rank)
        copies = self.copies.take([*mine, *(pieces.piece_of(name, tensor) for name, tensor in own.items())])
        scalars = {key: float(value) for key, value in self._optimizer_scalars()}
        facts = {"kind": "pieces", "optimizer": scalars, "scaler": self.scaler.state_dict()}
        return Save(facts, lambda folder, group: pieces.write(folder, copies, group), in_background=True)

    def load(self, folder: Path, facts: dict[str, Any], own: Sequence[str] = ()) -> dict[str, Tensor]:
        """Read this rank's pieces, and the tensors of its own."""
        if facts["kind"] == "deepspeed":
            raise ConfigError(
                f"{folder} was written by DeepSpeed's engine, and this backend cannot go on from it: use "
                f"train.backend=deepspeed, or its weights alone by train.init_from={folder}"
            )
        self._prime()
        mine = pieces.places_for(folder, own)
        pieces.read(folder, {**self.state(), **mine})
        for parameter in self.parameters:
            for key, value in self.optimizer.state[parameter].items():
                if not value.dim():
                    value.fill_(facts["optimizer"][key])
        if facts["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(facts["scaler"])
        return mine

    def _optimizer_scalars(self) -> list[tuple[str, Tensor]]:
        """Return what the optimizer counts, the same for every parameter."""
        return [(key, value) for key, value in self.optimizer.state[self.parameters[0]].items() if not value.dim()]

    def _prime(self) -> None:
        """Give the optimizer the state that it makes in its first step, without a change of the parameters."""
        if self.optimizer.state:
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for _, value in self._optimizer_scalars():
            value.zero_()

    @torch.no_grad()
    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        """Give the parameters their values, this rank's piece of each; one at a time is whole."""
        for name, parameter in self.named_parameters():
            piece = pieces.piece_of(name, parameter)
            window = tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.data.shape, strict=True))
            piece.data.copy_(weights[name][window])

    def close(self) -> None:
        """Give back what belongs to the process group."""


def prepare_blocks(model: Transformer, cfg: Config) -> None:
    """Give the blocks of ``model`` activation checkpointing and torch.compile, as ``cfg`` says."""
    for number, block in enumerate(model.blocks.values()):
        prepare_block(block, number, cfg)


def prepare_block(block: Any, number: int, cfg: Config) -> None:
    """Give one block activation checkpointing and torch.compile, as ``cfg`` says."""
    kind = cfg.train.activation_checkpointing
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _keep_products)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    elif kind == "full" or (kind.isdecimal() and number % int(kind) == 0):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if cfg.train.compile:
        block.compile()  # each by itself: they are alike, so that torch compiles one


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else ""
    return CheckpointPolicy.MUST_SAVE if name in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
