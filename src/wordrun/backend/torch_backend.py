"""Base class of all backends except DeepSpeed, which has its own engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from wordrun.backend.base import BackendSpec, Fetch, Save, StepResult, Writer, checked, require_shards
from wordrun.backend.buffer_snapshot import BufferSnapshot
from wordrun.backend.clipping import clip
from wordrun.backend.compile import compile_model, compile_options
from wordrun.backend.optimizer_state import SavedState, parameter_of
from wordrun.backend.param_groups import NamedParameters, set_learning_rate
from wordrun.backend.sharded_tensors import full, local
from wordrun.backend.step_timer import StepTimer
from wordrun.backend.unused_parameters import Unused
from wordrun.checkpoint import index, shards
from wordrun.checkpoint.folder import file_of
from wordrun.checkpoint.index import StoredTensor
from wordrun.dist import torch_private
from wordrun.dist.collectives import average
from wordrun.model.base import LossesOf, Model


class TorchBackend:
    """Gradient accumulation, clipping, optimizer steps, evaluation and checkpoints; subclasses add parallelism.

    Args:
        spec: config, ranks, and factories of the model and the optimizer.
        parts: this rank's part of the model, on its device and initialized.
    """

    options_prefix = "backend."
    """What messages put before the names of this backend's options."""

    def __init__(self, spec: BackendSpec, parts: Sequence[Model]) -> None:
        self.name = spec.cfg.train.backend
        self.device, self.dtype = spec.device, spec.dtype
        self.layout, self.rank, self.ranks = spec.layout, spec.world.rank, spec.world.size
        self.group = spec.mesh.get_group("replicate") if spec.mesh else dist.group.WORLD
        """The process group of all ranks, if the layout only replicates."""
        self.copies = shards.HostCopies()
        self.parts, self.model_options = parts, spec.cfg.model
        self.parameters = [p for part in parts for p in part.parameters()]
        # Stored as names, because a module may replace a buffer with another tensor.
        persistent = {name for part in parts for name, _ in part.weights()}
        self.buffer_names = persistent & {name for part in parts for name, _ in part.named_buffers()}
        rows = {name: rows for part in parts for name, rows in part.unpadded_rows.items()}
        # By name and shape, because optimizer state may have a different shape than its parameter.
        self.unpadded_rows = {(name, p.shape): rows[name] for name, p in self.named_parameters() if name in rows}
        for weights in (*(part.loaded_weights() for part in parts), spec.weights):
            if weights:
                self._fill(weights)
        trained = ((name, p) for name, p in self.named_parameters() if p.requires_grad)
        matrices = {name: rows for part in parts for name, rows in part.matrices().items()}
        self.optimizer = spec.optimizer(
            NamedParameters(trained, matrices, self.holders(), self.device, self.layout.of_parameters)
        )
        saves = spec.cfg.train.saves
        self.optimizer_state = SavedState(self.optimizer, spec.optimizer_part, self.named_parameters, checks=saves)
        self.grad_clip = spec.cfg.optimizer.grad_clip or float("inf")
        # Only fp16 has too few exponent bits for small gradients; bf16 needs no scaling.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.skips = spec.cfg.train.on_nonfinite == "skip"
        self.adapts = bool(spec.cfg.lora_rank)
        self.unused = Unused(spec.cfg, spec.step, self.options_prefix)
        self._on_gradients: Callable[[], None] | None = None
        self.clock: StepTimer | None = None
        """Measures the current step; None: there is none."""
        self.alone, self.compile_scope = spec.layout.size == 1, spec.cfg.train.compile_scope

    def micro_step(self, batch: Any, *, last: bool) -> Tensor:
        """Return the mean loss of ``batch``; gradients are reduced in the backward pass of the ``last`` micro-step."""
        raise NotImplementedError

    def train_step(self, batches: Sequence[Any], learning_rate: float, clock: StepTimer) -> StepResult:
        """Take one optimizer step on ``batches``."""
        losses = []
        self.clock = clock
        kept = BufferSnapshot(self.parts) if self.skips else None
        for number, batch in enumerate(batches, start=1):
            loss = self.micro_step(batch, last=number == len(batches)) / len(batches)
            clock.lap("forward")
            if not self.alone:  # the rest of this phase is spent waiting for other ranks
                torch_private.after_gradients(loss, partial(clock.lap, "backward"))
            self.backward(self.scaler.scale(loss))
            clock.lap("backward" if self.alone else "communication")
            losses.append(loss.detach())
        self.clock = None
        return StepResult(torch.stack(losses).sum(), self.update(learning_rate, clock, kept))

    @contextmanager
    def calling_with_gradients(self, call: Callable[[], None]) -> Iterator[None]:
        """Within a ``with`` block, call ``call`` in each step with complete gradients, before they are clipped."""
        self._on_gradients = call
        try:
            yield
        finally:
            self._on_gradients = None

    def timer(self) -> AbstractContextManager[None]:
        """Return the context in which a collective is measured, if it is part of a training step."""
        return nullcontext() if self.clock is None else self.clock.collective()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss``."""
        torch.autograd.backward(loss)

    def update(self, learning_rate: float, clock: StepTimer, kept: BufferSnapshot | None = None) -> Tensor:
        """Clip the gradients, step the optimizer and return the gradient norm before clipping.

        If buffers were ``kept``, a step with non-finite gradients is skipped, and the buffers are restored.
        """
        self.complete_gradients()
        self.unused.check(self.named_parameters(once=True))
        clock.lap("communication")
        self.scaler.unscale_(self.optimizer)
        norm = self.total_norm()
        if self._on_gradients is not None:
            self._on_gradients()
        if kept and not norm.isfinite():  # synchronizes with an accelerator at every step
            self.scaler.update()
            self.optimizer_state.zero_grad()
            kept.restore()
            return norm
        self._average_buffers()
        for part in self.parts:
            part.complete_step(self._add_up)
        clip(self.parameters, norm, self.grad_clip)
        set_learning_rate(self.optimizer, learning_rate)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer_state.zero_grad()
        self.optimizer_state.check()
        clock.lap("optimizer")
        return norm

    def complete_gradients(self) -> None:
        """Finish any gradient reduction that the backward passes have not done."""

    def total_norm(self) -> Tensor:
        """Return the gradient norm of the full model."""
        return get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    @torch.no_grad()
    def losses(self, batch: Any, outputs: list[Tensor] | None = None) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), and append the model's outputs to ``outputs``."""
        losses = self.forward_losses(batch, outputs=outputs)
        if outputs:
            outputs[-1] = full(outputs[-1])
        return losses

    def forward_losses(
        self, batch: Any, wrapper: nn.Module | None = None, outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), as ``losses`` does, through the model's ``wrapper``."""
        model = self.parts[0]
        with self.forward_context():
            asked = LossesOf(batch, outputs)
            losses = asked.computed_by(model) if wrapper is None else wrapper(asked)
            return full(checked(losses, batch, self.model_options, self.device))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits at the last of ``tokens``, (B, V)."""
        with self.forward_context():
            return full(self.parts[0].logits_at(self.padded(tokens), tokens.shape[1] - 1))

    def padded(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` padded at the end to a multiple of ``backend.tp``; no token attends to later padding."""
        return F.pad(tokens, (0, -tokens.shape[1] % self.layout.tp))

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context of forward passes, in which fp32 parameters compute in ``dtype``."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def named_parameters(self, *, once: bool = False) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield this rank's parameters by their names in the full model.

        Args:
            once: omit the second copy of a parameter that two pipeline stages share.
        """
        for part in self.parts:
            yield from part.named_parameters()

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's persistent buffers by their names in the full model."""
        for part in self.parts if self.buffer_names else ():
            yield from ((name, buffer) for name, buffer in part.named_buffers() if name in self.buffer_names)

    def holders(self) -> Any:
        """Return the process group whose ranks hold shards (or, without sharding, copies) of the same parameters.

        None: no other rank has this rank's parameters.
        """
        return self.group if self.layout.size > 1 else None

    def buffer_groups(self) -> list[Any]:
        """Return the process groups whose ranks hold the same buffers."""
        return [self.group]

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """Average buffers that depend on each rank's data, such as BatchNorm's running statistics."""
        if not all(part.averages_buffers for part in self.parts):
            return
        buffers = [buffer for _, buffer in self.buffers() if buffer.is_floating_point()]
        for group in self.buffer_groups() if buffers else ():
            average(buffers, group)

    def _add_up(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over the ranks that hold the same buffers, in place."""
        for group in self.buffer_groups():
            dist.all_reduce(tensor, group=group)

    def model_state(self, *, once: bool = False) -> dict[str, Tensor]:
        """Return this rank's shards of parameters and persistent buffers, by their names in a checkpoint.

        Parameters that LoRA has frozen, and those of ``Model.frozen_models``, are left out: the checkpoints of the runs
        from which they are have them.
        """
        state: dict[str, Tensor] = {}
        frozen = tuple(prefix for part in self.parts for prefix in part.frozen_models())
        saved = [
            (name, p)
            for name, p in self.named_parameters(once=once)
            if not name.startswith(frozen) and (p.requires_grad or not self.adapts)
        ]
        for name, tensor in [*saved, *self.buffers()]:
            state.setdefault(f"model.{name}", tensor)
        return state

    @contextmanager
    def using(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with ``weights`` instead of the model's own of the same names within a ``with`` block.

        The values are exchanged in place, so ``weights`` must have the names and the sharding of ``model_state``.
        """
        self.exchange(weights)
        try:
            yield
        finally:
            self.exchange(weights)

    @torch.no_grad()
    def exchange(self, weights: Mapping[str, Tensor]) -> None:
        """Exchange the values of ``weights`` and of the model's weights with these names."""
        state = self.model_state()
        for name, tensor in weights.items():
            ours, theirs = local(state[name]), local(tensor)
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)

    def begin_save(
        self,
        rank_tensors: Mapping[str, Tensor],
        weight_like: Mapping[str, Tensor] | None = None,
        writer: Writer | None = None,
    ) -> Save:
        """Copy the part of the training state that this rank writes to host memory."""
        mine = self.shards_to_write(weight_like or {})
        written = [*mine.shards, *(shards.shard_of(name, tensor) for name, tensor in rank_tensors.items())]
        firsts = range(0, self.ranks, self.layout.stride("pp"))
        tensors = mine.tensors if self.rank in firsts else {}
        if writer is not None:
            complete = writer(written, self.rank, tensors)
            return Save(self.facts(), lambda folder: complete(), in_background=True, shards=self.ranks)
        copies = self.copies.take(written)
        return Save(
            self.facts(),
            lambda folder: shards.write(folder, copies, self.rank, tensors),
            in_background=True,
            finish=lambda folder: shards.write_index(folder, firsts),
            shards=self.ranks,
        )

    def facts(self) -> dict[str, Any]:
        """Return what ``load`` needs besides the files."""
        return {"kind": "shards", "scaler": self.scaler.state_dict()}

    def shards_to_write(self, weight_like: Mapping[str, Tensor]) -> shards.RankShards:
        """Return what this rank writes into a checkpoint."""
        state = self.model_state(once=True)
        weight_like = {name: tensor for name, tensor in weight_like.items() if f"model.{parameter_of(name)}" in state}
        state |= {**weight_like, **self.optimizer_state.tensors()}
        return shards.to_write(state, self.layout.of_parameters, self.rank, self._rows_of(state))

    def load(
        self,
        folder: Path,
        facts: dict[str, Any],
        rank_tensors: Sequence[str] = (),
        weight_like: Mapping[str, Tensor] | None = None,
        fetch: Fetch | None = None,
    ) -> dict[str, Tensor]:
        """Read this rank's shards and its ``rank_tensors``."""
        require_shards(folder, facts, self.name)
        stored = self.stored(folder, facts)
        restored = self.optimizer_state.restored(stored, self.unpadded_rows)
        mine = {name: stored[name].empty() for name in rank_tensors if name in stored}
        tensors: dict[str, Any] = {**self.model_state(), **(weight_like or {}), **restored.tensors, **mine}
        others = [name for name in rank_tensors if name not in mine]
        self.read(folder, tensors, stored, fetch, [file_of(self.rank)] if others else [])
        restored.load(facts.get("optimizer", {}))
        if facts["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(facts["scaler"])
        self.complete_load(folder, facts, fetch)
        return mine | (shards.read_own(folder, self.rank, others) if others else {})

    def complete_load(self, folder: Path, facts: dict[str, Any], fetch: Fetch | None) -> None:
        """Restore what subclasses have besides weights and optimizer state; the arguments are those of ``load``."""

    def read(
        self,
        folder: Path,
        tensors: dict[str, Any],
        stored: Mapping[str, StoredTensor],
        fetch: Fetch | None,
        files: Iterable[str] = (),
    ) -> None:
        """Fill this rank's shards of ``tensors`` with the values in ``folder``; ``files`` of it will be needed, too."""
        unpadded = {name: shards.shard_of(name, tensors[name], n) for name, n in self._rows_of(tensors).items()}
        if fetch is not None:
            fetch({*shards.needed(folder, tensors | unpadded, stored), *files})
        for name, shard in unpadded.items():
            local(tensors[name].detach())[len(shard.data) :] = 0  # a non-finite step also corrupts the padding
        shards.read(folder, tensors | unpadded, stored)

    def stored(self, folder: Path, facts: dict[str, Any]) -> dict[str, StoredTensor]:
        """Return the tensors in the checkpoint ``folder`` by the names under which this rank reads them."""
        return index.load(folder)

    def _rows_of(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return, for those ``tensors`` whose parameter ends in padding, the number of rows that a checkpoint has."""
        keys = {name: (parameter_of(name), tensor.shape) for name, tensor in tensors.items()}
        return {name: self.unpadded_rows[key] for name, key in keys.items() if key in self.unpadded_rows}

    @torch.no_grad()
    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards of the initial ``weights``, reading one unsharded tensor at a time."""
        buffers = (each for part in self.parts for each in part.named_buffers())
        for name, tensor in [*self.named_parameters(), *buffers]:
            if name not in weights:  # a buffer that the checkpoint's version lacked, or an adapter of LoRA
                continue
            shard = shards.shard_of(name, tensor, self.unpadded_rows.get((name, tensor.shape)))
            window = tuple(slice(at, at + n) for at, n in zip(shard.offset, shard.data.shape, strict=True))
            shard.data.copy_(weights[name][window])

    def compile(self, *, on: bool) -> None:
        """Compile the model as train.compile_scope says, or use it uncompiled again, from the next pass on."""
        options = compile_options(self.device, self.layout)
        for part in self.parts:
            if on:
                compile_model(part, self.compile_scope, options)
                continue
            part.compile_loss(on=False)
            for module in (part, *part.named_blocks().values()):
                torch_private.uncompile(module)

    def close(self) -> None:
        """Release everything that uses the process group."""
