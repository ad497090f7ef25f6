"""Options of backends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from wordrun.common.errors import ConfigError
from wordrun.common.section import Section
from wordrun.common.validation import not_negative, one_of, positive
from wordrun.dist.mesh import Layout, resolve
from wordrun.train.options import DTYPES


@dataclass
class BackendConfig(Section):
    """Parallelization of the optimizer step.

    Besides options, this class has the properties that the rest of wordrun needs to know of every backend, so that
    nothing else has to know which backends exist. The defaults suit a backend that derives from ``TorchBackend`` and
    has a part of the batch on each rank; other backends override what differs.
    """

    engine: ClassVar[str] = ""
    """Name of the library whose own engine computes the gradients and takes the steps; empty: wordrun does, with
    torch's autograd and optimizers."""
    pipeline: ClassVar[bool] = False
    """Whether the model's layers are divided into the stages of a pipeline."""
    replicated: ClassVar[bool] = False
    """Whether every rank has the whole model, with all gradients, as one module."""
    sharded: ClassVar[bool] = False
    """Whether FSDP shards each parameter across ranks."""
    synchronous: ClassVar[bool] = True
    """Whether all data-parallel ranks take each step together and have the same weights after it; False: groups of
    ranks take steps by themselves, so that weights and gradients differ between the groups."""
    keeps_parameters: ClassVar[bool] = True
    """Whether each parameter and its gradient keep their name and shape, perhaps as a DTensor, so that hooks can read
    them and optimizers can treat matrices as matrices; False: an engine flattens them."""
    completes_steps: ClassVar[bool] = True
    """Whether ``Model.complete_step`` is called in each step, as balancing the load of experts requires."""
    pads_vocabulary: ClassVar[bool] = True
    """Whether the model may have a padded vocabulary: checkpoints are written without the padding."""
    always_shown: ClassVar[tuple[str, ...]] = ()
    """Options that `wordrun plan` names in its commands even if they have their defaults."""
    estimates: ClassVar[str] = ""
    """The module that registers the plan's estimates for these options; empty: the plan has them itself."""

    name: str = "DDP"
    """Name of the backend; set by train.backend."""

    def axes(self) -> dict[str, int | None]:
        """Return the requested size of each axis of the layout; -1: all remaining ranks, None: chosen for the job."""
        return {"replicate": -1}

    def layout(self, ranks: int, per_node: int) -> Layout:
        """Return the layout of ``ranks`` ranks, ``per_node`` to a node.

        Raises:
            ConfigError: the options do not suit the number of ranks.
        """
        at = resolve(ranks, per_node, self.axes())
        ep = max(1, self.experts_over)
        if at.shards % ep:
            fits = " or ".join(str(n) for n in range(1, at.shards + 1) if at.shards % n == 0)
            raise ConfigError(
                f"backend.ep={ep} does not divide the {at.shards} ranks of backend.shard x backend.cp, across which "
                f"experts are split: use backend.ep={fits}"
            )
        return replace(at, ep=ep)

    def conflicts_on(self, cfg: Any, at: Layout | None, gas: int | None) -> Iterable[str]:
        """Yield a message for each contradiction between ``cfg``, the complete Config, and these options.

        Args:
            cfg: the Config.
            at: the layout of the ranks; None: it is unknown, or other options have to be corrected first.
            gas: micro-steps of an optimizer step; None as for ``at``.
        """
        return []

    @classmethod
    def strategies(cls) -> dict[str, BackendConfig]:
        """Return further options of this backend that ``wordrun plan`` compares, by the names that it shows."""
        return {}

    @property
    def experts_over(self) -> int:
        """Number of ranks across which the experts of a mixture are split."""
        return 1

    @property
    def zero_bubble(self) -> bool:
        """Whether a pipeline computes gradients of weights later than those of activations."""
        return False

    @property
    def one_micro_step(self) -> bool:
        """Whether a step must have one micro-step."""
        return False

    @property
    def fixed_accumulation(self) -> bool:
        """Whether all steps must have the number of micro-steps for which the backend was built."""
        return self.pipeline

    @property
    def whole_layers(self) -> bool:
        """Whether each rank computes whole linear layers, in modules that train.float8 can replace."""
        return False

    @property
    def chunked_loss(self) -> bool:
        """Whether a loss in chunks can use the output layer's weights outside the layer's module."""
        return True

    @property
    def sharded_states(self) -> tuple[str, ...]:
        """What is sharded over the data-parallel ranks: any of "parameters", "gradients" and "optimizer"."""
        return ()

    @property
    def offloads(self) -> bool:
        """Whether, on accelerators, some of the training state is kept in host memory."""
        return False

    def unavailable(self) -> str:
        """Return why this backend cannot run here, such as a library that is not installed; empty: it can.

        ``wordrun plan``, which may be for another machine, does not call this.
        """
        return ""

    @property
    def one_module(self) -> bool:
        """Whether nothing runs between the blocks, so that the model may be compiled as one graph."""
        return self.replicated

    def stages(self, pp: int) -> int:
        """Return the number of stages in a pipeline of ``pp`` ranks."""
        return 1

    def microbatches_of(self, batch_size: int, pp: int) -> int:
        """Return the number of micro-batches into which a pipeline of ``pp`` ranks divides ``batch_size`` examples."""
        return 1


@dataclass
class DDPConfig(BackendConfig):
    """Distributed data parallel: a full model on every rank; gradients are averaged."""

    replicated: ClassVar[bool] = True

    name: str = "DDP"
    """Name of the backend; set by train.backend."""
    bucket_cap_mb: int = 25
    """Size of the gradient all-reduce buckets, in MiB."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views into the buckets, which saves a copy (memory and time)."""
    static_graph: bool = False
    """Tell DDP that the graph never changes, which enables optimizations; requires one micro-step per step."""
    find_unused_parameters: bool = False
    """Allow steps in which some parameters get no gradient; DDP then searches the graph of each step for them."""
    compress: str = "none"
    """Gradient compression for the all-reduce: none, or bf16 (half the traffic)."""

    @property
    def one_micro_step(self) -> bool:
        return self.static_graph

    @property
    def whole_layers(self) -> bool:
        return True

    def problems(self) -> Iterable[str]:
        yield from positive("backend", self, "bucket_cap_mb")
        yield from one_of("backend.compress", self.compress, ["none", "bf16"])
        if self.find_unused_parameters and self.static_graph:
            yield (
                "backend.static_graph=true finds unused parameters by itself, in the first step: omit "
                "backend.find_unused_parameters=true; if other parameters are unused in other steps, omit "
                "backend.static_graph=true"
            )


@dataclass
class FSDPConfig(BackendConfig):
    """Fully sharded data parallel: parameters, gradients and optimizer state are sharded across ranks (ZeRO-3)."""

    sharded: ClassVar[bool] = True

    name: str = "FSDP"
    """Name of the backend; set by train.backend."""
    replicate: int = 1
    """Number of model replicas, each sharded across backend.shard ranks (hybrid sharding); -1: all remaining ranks."""
    shard: int = -1
    """Number of ranks across which each replica is sharded; -1: all remaining ranks."""
    cp: int = 1
    """Context-parallel ranks: the number across which each sequence is split, for sequences that are too long for one
    rank's memory; -1: all remaining ranks."""
    cp_attention: str = "auto"
    """How context-parallel ranks compute attention: heads (each gets whole sequences of some heads) or gather (each
    gathers keys and values); auto: heads if their number allows it, or gather."""
    ep: int = 1
    """Expert-parallel ranks: the number across which the experts of a mixture are split; part of shard x cp."""
    tp: int | None = 1
    """Tensor-parallel ranks, all within a node; null: all ranks of a node."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again for the backward pass (ZeRO-3); false:
    keep them in between (ZeRO-2)."""
    reduce_dtype: str = "fp32"
    """Precision of the gradient reduction: fp32 or bf16."""
    cpu_offload: bool = False
    """Keep the shards in host memory and run the optimizer on the CPU."""
    prefetch: int = 1
    """Number of blocks whose parameters are prefetched, that is, gathered before they are used; 0: gather on demand."""

    def conflicts_on(self, cfg: Any, at: Layout | None, gas: int | None) -> Iterable[str]:
        """Return where the options of ``cfg`` contradict sharding over the ranks."""
        if at is None:
            return
        if self.cpu_offload and at.shards == 1:
            yield (
                "backend.cpu_offload=true moves shards to host memory, but with backend.shard=1 nothing is sharded: "
                "use backend.shard=-1 backend.replicate=1, or backend.cpu_offload=false"
            )
        if at.size == 1:
            yield (
                f"train.backend={cfg.train.backend} shards the model across ranks, but there is only one: "
                "use launch -n 2, or train.backend=DDP"
            )
        if DTYPES[cfg.train.dtype] == "fp16":
            yield (
                "train.dtype=fp16 needs a loss scaler, which is not available for sharded gradients: with "
                f"train.backend={cfg.train.backend} use train.dtype=bf16 or fp32"
            )

    def problems(self) -> Iterable[str]:
        yield from one_of("backend.reduce_dtype", self.reduce_dtype, ["fp32", "bf16"])
        yield from one_of("backend.cp_attention", self.cp_attention, ["auto", "heads", "gather"])
        yield from not_negative("backend", self, "prefetch")
        yield from positive("backend", self, "ep")

    def axes(self) -> dict[str, int | None]:
        return {"replicate": self.replicate, "shard": self.shard, "cp": self.cp, "tp": self.tp}

    @property
    def experts_over(self) -> int:
        return self.ep

    @property
    def whole_layers(self) -> bool:
        return self.tp == 1

    @property
    def sharded_states(self) -> tuple[str, ...]:
        return ("parameters", "gradients", "optimizer")

    @property
    def offloads(self) -> bool:
        return self.cpu_offload


@dataclass
class TPConfig(FSDPConfig):
    """Tensor parallel (Megatron) with sequence-parallel norms, combined with FSDP across the remaining ranks."""

    name: str = "TP"
    """Name of the backend; set by train.backend."""
    tp: int | None = None
    """Tensor-parallel ranks, all within a node; null: all ranks of a node."""

    @property
    def whole_layers(self) -> bool:
        return False


@dataclass
class PPConfig(FSDPConfig):
    """Pipeline parallel: each rank holds a stage of consecutive blocks, and micro-batches flow through the stages."""

    pipeline: ClassVar[bool] = True

    name: str = "PP"
    """Name of the backend; set by train.backend."""
    pp: int | None = None
    """Number of ranks in a pipeline; null: all remaining ranks."""
    replicate: int = -1
    """Number of pipeline replicas, each with different data; -1: all remaining ranks."""
    shard: int = 1
    """Number of ranks across which each stage's parameters, gradients and optimizer state are sharded."""
    schedule: str = "1F1B"
    """Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble or ZBVZeroBubble."""
    stages_per_rank: int = 2
    """Virtual stages per rank in interleaved schedules."""
    microbatches: int | None = None
    """Number of micro-batches per micro-step; null: one per rank of the pipeline if possible."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from one_of("backend.schedule", self.schedule, SCHEDULES)
        yield from positive("backend", self, "stages_per_rank", "microbatches")

    def axes(self) -> dict[str, int | None]:
        return {"pp": self.pp, **super().axes()}

    @property
    def whole_layers(self) -> bool:
        return False

    @property
    def zero_bubble(self) -> bool:
        return self.schedule in ZERO_BUBBLE

    def stages(self, pp: int) -> int:
        """Return the number of stages; with ZBVZeroBubble they form a V, and each rank has one in each half of it."""
        if self.schedule == "ZBVZeroBubble":
            return 2 * pp
        return pp * self.stages_per_rank if self.schedule in INTERLEAVED else pp

    def microbatches_of(self, batch_size: int, pp: int) -> int:
        """Return the option, or one micro-batch per rank of the pipeline if possible."""
        return self.microbatches or math.gcd(batch_size, pp)


@dataclass
class ThreeDConfig(PPConfig):
    """Pipeline x data x tensor parallel."""

    name: str = "3D"
    """Name of the backend; set by train.backend."""
    pp: int | None = 2
    """Number of ranks in a pipeline."""
    replicate: int = 1
    """Number of replicas of the sharded model; for DDP across pipelines use replicate=-1 shard=1."""
    shard: int = -1
    """Number of ranks across which each stage's parameters, gradients and optimizer state are sharded; -1: all
    remaining ranks."""
    tp: int | None = 2
    """Tensor-parallel ranks, all within a node; null: all ranks of a node."""


ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that fill the bubble with the gradients of weights, computed later than those of activations."""
INTERLEAVED = ("Interleaved1F1B", *ZERO_BUBBLE)
"""Schedules in which a rank has several virtual stages."""
SCHEDULES = ("GPipe", "1F1B", *INTERLEAVED)
