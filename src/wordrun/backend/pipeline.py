"""Pipeline parallelism (Huang et al. 2019, Narayanan et al. 2021), alone or with data and tensor parallelism (3D)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from wordrun.backend.base import BackendSpec, Fetch, StepResult
from wordrun.backend.buffer_snapshot import BufferSnapshot
from wordrun.backend.fsdp import FSDPBackend
from wordrun.backend.options import INTERLEAVED, PPConfig
from wordrun.backend.sharded_tensors import full, local
from wordrun.backend.step_timer import StepTimer
from wordrun.common.errors import ConfigError
from wordrun.config.registry import part_of
from wordrun.dist import torch_private
from wordrun.dist.collectives import average
from wordrun.dist.mesh import blocks_of, owner_of
from wordrun.model.transformer import Transformer
from wordrun.train.options import accumulation


class PipelineBackend(FSDPBackend):
    """``train.backend=PP`` and ``3D``: micro-batches flow through the stages in the order of a schedule.

    All micro-steps of a step go through the pipeline together, so that it fills and drains once per step.
    """

    parts: Sequence[Transformer]

    def __init__(self, spec: BackendSpec) -> None:
        cfg, options, pp = spec.cfg, spec.options_of(PPConfig), spec.layout.pp
        if pp > 1 and spec.layout.tp > 1 and not torch_private.pipeline_takes_tensor_parallel():
            wrong = f"in a pipeline needs torch 2.11 or newer; torch {torch.__version__} would compute wrong gradients"
            raise ConfigError(
                f"backend.tp={spec.layout.tp} {wrong}: use backend.tp=1, or train.backend=TP",
                page="backends.md#pipelines",
            )
        if options.schedule == "ZBVZeroBubble" and spec.device.type == "cpu" and not torch_private.zbv_runs_on_cpus():
            wrong = f"on CPUs needs torch 2.12 or newer, not {torch.__version__}"
            raise ConfigError(f"backend.schedule=ZBVZeroBubble {wrong}: use backend.schedule=InterleavedZeroBubble")
        all_logits = options.zero_bubble and not torch_private.zero_bubble_takes_functions()
        if all_logits and cfg.train.chunked_loss:
            wrong = f"with backend.schedule={options.schedule} needs torch 2.13 or newer, not {torch.__version__}"
            raise ConfigError(f"train.chunked_loss=true {wrong}: use false, or backend.schedule=Interleaved1F1B")
        self.count = options.stages(pp)
        self.owners = [owner_of(stage, pp, options.schedule) for stage in range(self.count)]
        self.coordinate = spec.layout.index(spec.world.rank, "pp")
        self.numbers = [stage for stage, owner in enumerate(self.owners) if owner == self.coordinate]
        named = part_of("model", cfg.model)
        model = named.load()
        if isinstance(model, type) and issubclass(model, Transformer) and model.has_own_losses():
            raise ConfigError(
                f"{named}: the stages of a pipeline do not call {model.__name__}.losses: use train.backend=FSDP, or "
                "change what the model computes in its blocks or its forward method",
                page="extend/model.md#a-transformer",
            )
        super().__init__(spec, [blocks_of(stage, self.count, cfg.transformer.n_layer) for stage in self.numbers])
        if all_logits:
            for part in self.parts:
                part.choose_loss(chunked=False)
        self.pipeline_group = self.mesh.get_group("pp")
        parts = [
            PipelineStage(part, number, self.count, self.device, group=self.pipeline_group)
            for number, part in zip(self.numbers, self.parts, strict=True)
        ]
        self.scale: Tensor | float = 1.0
        """The scale of the losses of this step, the same for all its batches."""
        self.schedule = getattr(pipelining, f"Schedule{options.schedule}")(
            parts if options.schedule in INTERLEAVED else parts[0],
            options.microbatches_of(cfg.model.batch_size, pp) * accumulation(cfg, spec.layout.dp),
            loss_fn=lambda losses, _: full(losses).mean() * self.scale,
        )
        self.tied = self._tied_weights()

    def train_step(self, batches: Sequence[Any], learning_rate: float, clock: StepTimer) -> StepResult:
        """Take one optimizer step, sending all ``batches`` through the pipeline."""
        inputs, every, targets = self.parts[0].stage_inputs(batches)
        self.scale = 1.0 if batches[0].scale is None else batches[0].scale
        losses: list[Tensor] = []
        kept = BufferSnapshot(self.parts) if self.skips else None
        first = (inputs,) if self.parts[0].is_first else ()
        # The last stage computes the losses; the schedule requires a target, but does not use it.
        last = {"target": targets, "targets": targets, "losses": losses} if self.parts[-1].is_last else {}
        with self.forward_context():
            torch_private.pipeline_step(self.schedule, *first, **last, **every)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)
        dist.broadcast(loss, group=self.pipeline_group, group_src=self.owners[-1])
        clock.lap("passes")
        return StepResult(loss, self.update(learning_rate, clock, kept))

    def complete_gradients(self) -> None:
        """Also average gradients over the pipeline's replicas, and sum those of the tied weight over its copies."""
        super().complete_gradients()
        self._average_gradients()
        self._share_tied_gradients()

    def gradients(self) -> list[Tensor]:
        """Return this rank's gradient shards; a weight that two stages share counts only in the first."""
        second = self.parts[-1].head.weight if self.tied and self.parts[-1].is_last else None
        return [p.grad for p in self.parameters if p.grad is not None and p is not second]

    def named_parameters(self, *, once: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters; an output layer tied to the embedding has the embedding's name."""
        for name, parameter in super().named_parameters():
            copy = name == "head.weight" and self.parts[0].tied
            if not (copy and once):
                yield ("tokens.weight" if copy else name), parameter

    def complete_load(self, folder: Path, facts: dict[str, Any], fetch: Fetch | None) -> None:
        self._copy_tied_weight()

    def exchange(self, weights: Mapping[str, Tensor]) -> None:
        super().exchange(weights)
        self._copy_tied_weight()

    @torch.no_grad()
    def _copy_tied_weight(self) -> None:
        """Copy the tied weight to its second copy, if this rank has two."""
        if len(self.tied) == 2:
            first, second = self.tied
            second.copy_(first)

    def _tied_weights(self) -> list[Tensor]:
        """Return this rank's copies of the tied weight, if embedding and output layer are in different stages."""
        if not self.parts[0].tied or self.count == 1:
            return []
        copies = [self.parts[0].tokens.weight] if self.parts[0].is_first else []
        return copies + ([self.parts[-1].head.weight] if self.parts[-1].is_last else [])

    def _average_gradients(self) -> None:
        """Average the gradients over the pipeline's replicas in one all-reduce, unless ``fully_shard`` does."""
        if self.sharded or self.layout.replicate == 1:
            return
        average([local(p.grad) for p in self.parameters if p.grad is not None], self.mesh.get_group("replicate"))

    def _share_tied_gradients(self) -> None:
        """Sum the gradients of the tied weight over its copies, so that the copies stay equal."""
        mine = [local(p.grad) for p in self.tied if p.grad is not None]
        if len(mine) == 2:
            total = mine[0] + mine[1]
            mine[0].copy_(total)
            mine[1].copy_(total)
        elif mine:
            (gradient,) = mine
            peer = self.owners[-1] if self.parts[0].is_first else self.owners[0]
            theirs = torch.empty_like(gradient)
            send = dist.P2POp(dist.isend, gradient.contiguous(), group=self.pipeline_group, group_peer=peer)
            receive = dist.P2POp(dist.irecv, theirs, group=self.pipeline_group, group_peer=peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            gradient += theirs

    @torch.no_grad()
    def losses(self, batch: Any, outputs: list[Tensor] | None = None) -> Tensor:
        """Return the loss of each example of ``batch``, (B,); only the last stage has outputs, so none are returned."""
        inputs, every, targets = self.parts[0].stage_inputs([batch])
        with self.forward_context():
            losses = self._forward(inputs, targets.shape[:1], lambda part, x: part(x, **every, targets=targets), every)
        losses = losses if batch.scale is None else losses * batch.scale
        return self.context.mean(losses) if self.context else losses

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        shape, padded = (len(tokens), self.parts[0].padded_vocab_size), self.padded(tokens)
        every = {**self.parts[0].in_every_stage(padded), "at": tokens.shape[1] - 1}
        return self._forward(padded, shape, lambda part, x: part(x, **every), every)

    def _forward(
        self, inputs: Tensor, shape: Sequence[int], last: Callable[[Transformer, Tensor], Tensor], every: dict[str, Any]
    ) -> Tensor:
        """Send ``inputs`` through all stages; return the last stage's result on every rank.

        Args:
            inputs: input of the first stage.
            shape: shape of the result.
            last: computes the result from the last stage and its input.
            every: keyword arguments for the other stages.
        """
        x = inputs
        # Without sharding, autocast in fp16 keeps the residual stream in fp32.
        dtype = self.dtype if self.sharded or self.dtype == torch.bfloat16 else torch.float32
        between = self.parts[0].stage_output_shape(inputs, self.layout.tp)
        for stage, part in zip(self.numbers, self.parts, strict=True):
            if stage and self.owners[stage - 1] != self.coordinate:
                x = torch.empty(between, device=self.device, dtype=dtype)
                dist.recv(x, group=self.pipeline_group, group_src=self.owners[stage - 1])
            x = last(part, x) if part.is_last else part(x, **every)
            if stage + 1 < self.count and self.owners[stage + 1] != self.coordinate:
                dist.send(x.contiguous(), group=self.pipeline_group, group_dst=self.owners[stage + 1])
        mine = self.owners[-1] == self.coordinate
        result = full(x).float() if mine else torch.empty(*shape, device=self.device)
        dist.broadcast(result, group=self.pipeline_group, group_src=self.owners[-1])
        return result
