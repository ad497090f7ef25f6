"""A strategy: one way to train the model on the devices, and the arithmetic of its pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from wordrun.checks import accumulation, microbatches, stages
from wordrun.config import INTERLEAVED, BackendConfig, Config, DDPConfig, FSDPConfig, PPConfig
from wordrun.dist.mesh import Layout
from wordrun.errors import ConfigError

FP32 = 4


class NoEstimateError(ConfigError):
    """The plan has no arithmetic for this model or backend."""


@dataclass(frozen=True)
class Strategy:
    """One way to train the model on the devices."""

    name: str
    cfg: Config
    """With its backend and batch size, and a precision other than auto."""
    layout: Layout
    overrides: tuple[str, ...] = ()
    """What selects it on the command line."""
    on_cpu: bool = False

    @property
    def backend(self) -> BackendConfig:
        """The options of its backend."""
        return self.cfg.backend

    @property
    def gas(self) -> int:
        """Micro-steps per optimizer step."""
        return accumulation(self.cfg, self.layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step on a rank."""
        return self.cfg.model.batch_size * self.cfg.model.block_size

    @property
    def compute(self) -> int:
        """Bytes per element of a matrix product."""
        return FP32 if self.cfg.train.dtype == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream, which autocast leaves in fp32 where nothing is sharded."""
        unsharded = isinstance(self.backend, FSDPConfig) and self.layout.dp == 1
        return FP32 if unsharded or isinstance(self.backend, DDPConfig) else self.compute


def stages_of(strategy: Strategy, options: PPConfig, rank: int) -> list[range]:
    """Return the blocks of each pipeline stage on the rank with index ``rank`` in its pipeline."""
    from wordrun.backend.pipeline import blocks_of, owner_of

    pp, n_layer = strategy.layout.pp, strategy.cfg.model.n_layer
    count = stages(options, pp)
    mine = [stage for stage in range(count) if owner_of(stage, pp, options.schedule) == rank]
    return [blocks_of(stage, count, n_layer) for stage in mine]


def in_flight(schedule: str, pp: int, rank: int, parts: int, stages_per_rank: int) -> int:
    """Return the most forward passes of a rank whose backward passes have not finished.

    Args:
        schedule: by name.
        pp: ranks in the pipeline.
        rank: index of the rank in it.
        parts: micro-batches per step.
        stages_per_rank: stages on each rank; every micro-batch passes through all of them.
    """
    if schedule == "GPipe":
        return parts
    if schedule == "1F1B":
        return min(parts, pp - rank)
    if schedule == "Interleaved1F1B":
        return min(parts * stages_per_rank, (stages_per_rank - 1) * pp + 2 * (pp - 1 - rank) + 1)
    return min(parts * stages_per_rank, stages_per_rank * pp)  # zero-bubble schedules postpone gradients of weights


def bubble(strategy: Strategy) -> float:
    """Return the fraction of a step for which a rank of the pipeline is idle.

    (p - 1) / (v m + p - 1) for p ranks, m micro-batches and v stages per rank (Narayanan et al. 2021, section 2.2). A
    zero-bubble schedule fills two thirds of it, ZBV all of it, if the forward pass, the gradients of inputs and those
    of weights take equally long (Qi et al. 2023).
    """
    options, pp = strategy.backend, strategy.layout.pp
    if not isinstance(options, PPConfig) or options.schedule == "ZBVZeroBubble":
        return 0.0
    idle = (pp - 1) / (3 if options.schedule == "InterleavedZeroBubble" else 1)
    stages_per_rank = options.stages_per_rank if options.schedule in INTERLEAVED else 1
    return idle / (stages_per_rank * microbatches(strategy.cfg, options, pp) * strategy.gas + idle)
