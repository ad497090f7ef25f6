"""DiLoCo (Douillard et al. 2023): islands of ranks train independently, and exchange weights every few steps.

Each island takes steps of the inner backend and optimizer. In an exchange, every ``sync_every`` steps, the
change of the weights since the last one, averaged over the islands, is the gradient of an outer step, SGD with Nesterov
momentum; all islands continue from its result. With several fragments (streaming DiLoCo, Douillard et al. 2025), parts
of the weights are exchanged at different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from wordrun.backend.base import BackendSpec, Fetch, StepResult
from wordrun.backend.ddp import DDPBackend
from wordrun.backend.diloco.options import DilocoConfig
from wordrun.backend.fsdp import FSDPBackend
from wordrun.backend.sharded_tensors import local
from wordrun.backend.step_timer import StepTimer
from wordrun.backend.torch_backend import TorchBackend
from wordrun.checkpoint import index, shards
from wordrun.checkpoint.index import StoredTensor
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.dist.mesh import AXES, Layout

BUCKET = 2**24
"""Elements that are exchanged at once: 64 MiB in fp32."""


class Islands(TorchBackend):
    """The backend of a rank's island, with the weights that all islands share (the outer weights)."""

    options_prefix = "backend.inner_options."
    options_of_islands: DilocoConfig
    islands: int
    island: int
    """This rank's island."""
    across: Any
    """Process group of the ranks that hold the same shards on each island."""
    all_ranks: Layout
    """The layout of all ranks."""

    def begin(self, options: DilocoConfig, spec: BackendSpec, across: Any) -> None:
        """Start from the initial weights; ``spec`` describes all ranks, not one island."""
        self.options_of_islands, self.across, self.all_ranks = options, across, spec.layout
        self.islands, self.island = spec.layout.islands, self.rank // self.layout.size
        self.steps, self.last = spec.step, spec.cfg.train.max_iters
        state = self.model_state()
        self.outer = {name: tensor.detach().clone() for name, tensor in state.items()}
        trained = [name for name in state if name.removeprefix("model.") not in self.buffer_names]
        self.rates = dict.fromkeys(trained, options.outer_lr)
        """Learning rate of the outer step, by weight; for buffers 1, so that they are averaged."""
        kept = trained if options.outer_momentum else []
        self.momentum = {name: torch.zeros_like(self.outer[name]) for name in kept}
        self.fragments = fragments(self.outer, options.fragments, self.parts[0].block_of)
        self.stale: set[int] = set()
        """The fragments whose weights may differ between the islands."""
        LOGGER.info(
            "islands: %d, each of %s rank(s) that train with %s; all weights are exchanged every %d steps",
            self.islands,
            self.layout.size,
            options.inner,
            options.sync_every,
        )
        if self.islands == 1:
            LOGGER.warning(
                "train.backend=diloco has one island, so nothing is exchanged, and the outer steps follow its weights "
                "alone: start more ranks, or use train.backend=%s",
                options.inner,
                extra=FIRST_RANK,
            )

    def train_step(self, batches: Sequence[Any], learning_rate: float, clock: StepTimer) -> StepResult:
        """Take one optimizer step on this island, and exchange the fragments that are due; after the last step, all."""
        result = super().train_step(batches, learning_rate, clock)
        self.steps += 1
        every, count = self.options_of_islands.sync_every, len(self.fragments)
        due = {at for at in range(count) if self.steps == self.last or (self.steps - at * every // count) % every == 0}
        self.stale = set(range(count)) - due
        for at in sorted(due):
            for names in self._buckets(self.fragments[at]):
                self._outer_step(names)
        if due:
            clock.lap("communication")
        return result

    def _buckets(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Divide ``names`` into buckets of about ``BUCKET`` elements, so that an exchange needs little memory."""
        some: list[str] = []
        for name in names:
            some.append(name)
            if sum(local(self.outer[each]).numel() for each in some) >= BUCKET:
                yield some
                some = []
        if some:
            yield some

    @torch.no_grad()
    def _outer_step(self, names: Sequence[str]) -> None:
        """Take an outer step for the weights ``names``, and continue from its result."""
        state, keep = self.model_state(), self.options_of_islands.outer_momentum
        inner, outer = ([local(each[name]) for name in names] for each in (state, self.outer))
        flat = torch.cat([(o - i).flatten().to(self.device, torch.float32) for i, o in zip(inner, outer, strict=True)])
        flat = self._mean(flat)
        gradients = torch.split(flat, [tensor.numel() for tensor in outer])
        for name, i, o, flat_gradient in zip(names, inner, outer, gradients, strict=True):
            gradient = flat_gradient.view_as(o).to(o.device)
            if name in self.momentum:
                momentum = local(self.momentum[name]).mul_(keep).add_(gradient)
                gradient = gradient.add(momentum, alpha=keep)
            if o.is_floating_point():
                o.sub_(gradient, alpha=self.rates.get(name, 1.0))
            else:  # counters, the same on all islands
                o.copy_(i)
            i.copy_(o)

    def _mean(self, flat: Tensor) -> Tensor:
        """Return the mean of ``flat`` over the islands."""
        if self.islands == 1:
            return flat
        dist.all_reduce(flat, group=self.across)
        return flat.div_(self.islands)

    def outer_weights(self) -> AbstractContextManager[None]:
        """Return the context in which the model has the outer weights."""
        return self.using(self.outer) if self.stale else nullcontext()

    def losses(self, batch: Any, outputs: list[Tensor] | None = None) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), with the outer weights."""
        with self.outer_weights():
            return super().losses(batch, outputs)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits at the last of ``tokens``, (B, V), with the outer weights."""
        with self.outer_weights():
            return super().logits(tokens)

    def facts(self) -> dict[str, Any]:
        found = {**super().facts(), "islands": self.islands, "between": bool(self.stale), "steps": self.steps}
        if self.stale:
            found["only_for"] = {
                "backend": self.name,
                "why": f"was saved between two exchanges of {self.islands} islands, whose weights differ then",
                "instead": "resume from a checkpoint of a step that ends with an exchange",
            }
        return found

    def shards_to_write(self, weight_like: Mapping[str, Tensor]) -> shards.RankShards:
        """Return what this rank writes: its part of the outer state and of its island's own state.

        The outer weights have the names of a model's weights, and the first island's optimizer state those of any
        optimizer, so that other backends and programs read them as usual.
        """
        outer = self._outer_state()
        ours = shards.to_write(outer, self.all_ranks.of_parameters, self.rank, self._rows_of(outer))
        mine = super().shards_to_write(weight_like)

        def named(name: str) -> str:
            return name if self.island == 0 and not name.startswith("model.") else f"island.{self.island}.{name}"

        kept = [name for name in mine.tensors if self.stale or not name.startswith("model.")]
        tensors = {named(name): mine.tensors[name] for name in kept}
        own = [replace(shard, name=named(shard.name)) for shard in mine.shards if shard.name in kept]
        return shards.RankShards([*ours.shards, *own], ours.tensors | tensors)

    def _outer_state(self) -> dict[str, Tensor]:
        """Return the outer weights and their momentum by their names in a checkpoint."""
        return self.outer | {f"outer.{name.removeprefix('model.')}.momentum": m for name, m in self.momentum.items()}

    def stored(self, folder: Path, facts: dict[str, Any]) -> dict[str, StoredTensor]:
        """Return the tensors of the checkpoint ``folder``, with the island's own in place of those of island 0.

        The number of islands may have changed. Of N saved islands, island i continues from its own state if i < N.
        Otherwise it starts from the outer weights and the optimizer state of island i modulo N. What a removed island
        has learned since the last exchange is lost.
        """
        saved, found = facts.get("islands", 1), index.load(folder)
        if saved not in (1, self.islands):
            LOGGER.info("the checkpoint has %d islands, this run has %d", saved, self.islands)
        prefix = f"island.{self.island % saved}."
        weights = prefix + "model."
        own = {
            name: tensor
            for name, tensor in found.items()
            if name.startswith(prefix) and (self.island < saved or not name.startswith(weights))
        }
        return found | {name.removeprefix(prefix): replace(tensor, key=name) for name, tensor in own.items()}

    def complete_load(self, folder: Path, facts: dict[str, Any], fetch: Fetch | None) -> None:
        """Read the outer state, after this island's; without an outer state, start one from the weights."""
        super().complete_load(folder, facts, fetch)
        state = self.model_state()
        for name, tensor in self.outer.items():
            local(tensor).copy_(local(state[name].detach()))
        for tensor in self.momentum.values():
            local(tensor).zero_()
        stored = index.load(folder)
        outer = {name: tensor for name, tensor in self._outer_state().items() if name in stored}
        self.read(folder, outer, stored, fetch)
        self.steps = facts.get("steps", self.steps)
        self.stale = set(range(len(self.fragments))) if facts.get("between") else set()


def fragments(names: Iterable[str], count: int, block_of: Callable[[str], str]) -> list[list[str]]:
    """Deal blocks, and other modules, to ``count`` fragments in turn; return the names in each."""
    found: list[list[str]] = [[] for _ in range(count)]
    numbers: dict[str, int] = {}
    for name in names:
        path = name.removeprefix("model.")
        unit = block_of(path) or path.partition(".")[0]
        found[numbers.setdefault(unit, len(numbers)) % count].append(name)
    return found


class DDPIslands(Islands, DDPBackend):
    """Islands of data-parallel ranks."""


class FSDPIslands(Islands, FSDPBackend):
    """Islands of ranks over which the training state is sharded."""


def diloco(spec: BackendSpec) -> Islands:
    """Return the backend for ``train.backend=diloco``."""
    options = spec.options_of(DilocoConfig)
    inside, layout = options.inside(), spec.layout.of_island
    axes = AXES if inside.sharded else ("replicate",)
    shape = (spec.layout.islands, *(getattr(layout, axis) for axis in axes))
    mesh = init_device_mesh(spec.device.type, shape, mesh_dim_names=("island", *axes))
    inner = replace(spec, cfg=replace(spec.cfg, backend=inside), layout=layout, mesh=mesh)
    made = FSDPIslands(inner) if inside.sharded else DDPIslands(inner)
    made.begin(options, spec, mesh.get_group("island"))
    return made
