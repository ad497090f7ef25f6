"""Pipeline parallel (Huang et al. 2019, Narayanan et al. 2021), alone or with data and tensor parallel: 3D."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from wordrun.backend import split
from wordrun.backend.base import Job, StepResult
from wordrun.backend.fsdp import FSDPBackend
from wordrun.backend.stopwatch import Stopwatch
from wordrun.checks import accumulation, microbatches, stages
from wordrun.config import INTERLEAVED, PPConfig
from wordrun.data.batch import Batch
from wordrun.model import Transformer
from wordrun.model.base import losses_of_sequences


def owner_of(stage: int, pp: int, schedule: str) -> int:
    """Return which of the ``pp`` ranks of a pipeline has ``stage``: dealt out in turn, or forth and back in a V."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if turn and schedule == "ZBVZeroBubble" else place


def blocks_of(stage: int, count: int, n_layer: int) -> range:
    """Return the numbers of the blocks of ``stage``, one of ``count`` of as equal a size as can be."""
    return range(stage * n_layer // count, (stage + 1) * n_layer // count)


class PipelineBackend(FSDPBackend):
    """``train.backend=PP`` and ``3D``: a step's micro-batches flow through the stages, in the order of a schedule.

    All micro-steps of a step go through the pipeline together, so that it fills and drains once a step.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        cfg, options = job.cfg, job.cfg.backend
        assert isinstance(options, PPConfig)
        self.group = self.mesh.get_group("pp")
        self.n_embd = cfg.model.n_embd
        parts = [
            PipelineStage(part, number, self.count, self.device, group=self.group)
            for number, part in zip(self.numbers, self.parts, strict=True)
        ]
        kind: Any = schedules.get_schedule_class(options.schedule)
        self.schedule = kind(
            parts if options.schedule in INTERLEAVED else parts[0],
            microbatches(cfg, options, job.layout.pp) * accumulation(cfg, job.layout.dp),
            loss_fn=lambda logits, targets: split.whole(losses_of_sequences(logits, targets)).mean(),
        )
        self.tied = self._tied_weights()

    def split(self, splitter: split.Splitter) -> list[Transformer]:
        """Return this rank's stages."""
        options, layout, world = splitter.options, splitter.job.layout, splitter.job.world
        assert isinstance(options, PPConfig)
        self.count = stages(options, layout.pp)
        self.owners = [owner_of(stage, layout.pp, options.schedule) for stage in range(self.count)]
        self.place = layout.index(world.rank, "pp")
        self.numbers = [stage for stage, owner in enumerate(self.owners) if owner == self.place]
        n_layer = splitter.job.cfg.model.n_layer
        layers = [blocks_of(stage, self.count, n_layer) for stage in self.numbers]
        return [splitter.build(each) for each in layers]

    def train_step(self, batches: Sequence[Batch], learning_rate: float, clock: Stopwatch) -> StepResult:
        """Take one optimizer step on ``batches``, all of which flow through the pipeline."""
        tokens = torch.cat([batch.tokens for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        documents = Batch(tokens, targets, batches[0].eot).documents
        losses: list[Tensor] = []
        first = (tokens,) if self.parts[0].is_first else ()
        last = {"target": targets, "losses": losses} if self.parts[-1].is_last else {}
        every = {} if documents is None else {"documents": documents}
        with self.vocabulary_in_pieces():
            self.schedule.step(*first, **last, **every, return_outputs=False)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)
        dist.broadcast(loss, group=self.group, group_src=self.owners[-1])
        clock.lap("passes")
        return StepResult(loss, self.update(learning_rate, clock))

    def complete_gradients(self) -> None:
        """Average the gradients where nobody else has, and add up those of a weight that two stages share."""
        super().complete_gradients()
        self._average_gradients()
        self._share_tied_gradients()

    def gradients(self) -> list[Tensor]:
        """Return this rank's pieces of the gradients; of a weight that two stages share, the first one's alone."""
        again = self.parts[-1].head.weight if self.tied and self.parts[-1].is_last else None
        return [p.grad for p in self.parameters if p.grad is not None and p is not again]

    def clip(self, norm: Tensor) -> None:
        """Scale the gradients down to optimizer.grad_clip where their ``norm`` is above it."""
        split.clip([p.grad for p in self.parameters if p.grad is not None], norm, self.grad_clip)

    def named_parameters(self, *, once: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters; an output layer that is the embedding has its name."""
        for name, parameter in super().named_parameters():
            copy = name == "head.weight" and self.parts[0].tied
            if not (copy and once):
                yield ("tokens.weight" if copy else name), parameter

    def state(self, *, once: bool = False) -> dict[str, Tensor]:
        """Return parameters and optimizer state; of a weight that this rank has twice, the first."""
        return super().state(once=once or len(self.tied) == 2)

    @torch.no_grad()
    def load(self, folder: Path, facts: dict[str, Any], own: Sequence[str] = ()) -> dict[str, Tensor]:
        """Read this rank's pieces, and the tensors of its own."""
        mine = super().load(folder, facts, own)
        if len(self.tied) == 2:
            first, second = self.tied
            second.copy_(first)
            for key, value in self.optimizer.state[first].items():
                self.optimizer.state[second][key].copy_(value)
        return mine

    def _tied_weights(self) -> list[Tensor]:
        """Return this rank's copies of the weight that embedding and output layer share, if those are in two stages."""
        if not self.parts[0].tied or self.count == 1:
            return []
        copies = [self.parts[0].tokens.weight] if self.parts[0].is_first else []
        return copies + ([self.parts[-1].head.weight] if self.parts[-1].is_last else [])

    def _average_gradients(self) -> None:
        """Average the gradients over the copies of the pipeline, all in one message, where nobody else has."""
        if self.sharded or self.layout.replicate == 1:
            return
        mine = [split.local(p.grad) for p in self.parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in mine])
        dist.all_reduce(flat, group=self.mesh.get_group("replicate"))
        flat /= self.layout.replicate
        for gradient, averaged in zip(mine, torch.split(flat, [gradient.numel() for gradient in mine]), strict=True):
            gradient.copy_(averaged.view_as(gradient))

    def _share_tied_gradients(self) -> None:
        """Give all copies of the shared weight the sum of their gradients: they remain equal."""
        mine = [split.local(p.grad) for p in self.tied if p.grad is not None]
        if len(mine) == 2:
            total = mine[0] + mine[1]
            mine[0].copy_(total)
            mine[1].copy_(total)
        elif mine:
            (gradient,) = mine
            peer = self.owners[-1] if self.parts[0].is_first else self.owners[0]
            theirs = torch.empty_like(gradient)
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, gradient.contiguous(), group=self.group, group_peer=peer),
                    dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
                ]
            ):
                work.wait()
            gradient += theirs

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each sequence of ``batch``, (B,)."""
        with self.vocabulary_in_pieces():
            shape = (len(batch.tokens),)
            return self._through(batch.tokens, shape, documents=batch.documents, targets=batch.targets)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last of ``tokens``, (B, V)."""
        vocab_size = self.parts[0].vocab_size
        return self._through(self.padded(tokens), (len(tokens), vocab_size), at=tokens.shape[1] - 1)

    def _through(self, tokens: Tensor, shape: tuple[int, ...], documents: Tensor | None = None, **last: Any) -> Tensor:
        """Send ``tokens`` through all stages; return what the last one makes of them with ``last``, on every rank.

        Args:
            tokens: (B, T).
            shape: of the result.
            documents: of every part's forward.
            last: arguments of the last part's forward.
        """
        x = tokens
        # Autocast, where nothing is sharded, keeps the residual stream in fp32.
        dtype = self.dtype if self.sharded else torch.float32
        between = (tokens.shape[0], tokens.shape[1] // self.layout.tp, self.n_embd)
        for stage, owner in enumerate(self.owners):
            if owner != self.place:
                continue
            part = self.parts[self.numbers.index(stage)]
            if stage and self.owners[stage - 1] != owner:
                x = torch.empty(between, device=self.device, dtype=dtype)
                dist.recv(x, group=self.group, group_src=self.owners[stage - 1])
            x = part(x, documents=documents, **(last if part.is_last else {}))
            if stage + 1 < self.count and self.owners[stage + 1] != owner:
                dist.send(x.contiguous(), group=self.group, group_dst=self.owners[stage + 1])
        mine = self.owners[-1] == self.place
        result = split.whole(x).float() if mine else torch.empty(shape, device=self.device)
        dist.broadcast(result, group=self.group, group_src=self.owners[-1])
        return result
