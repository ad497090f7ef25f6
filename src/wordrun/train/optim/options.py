"""Options of optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from wordrun.common.section import Section
from wordrun.common.validation import above_zero, fractions, not_negative, one_of, positive


@dataclass
class OptimizerConfig(Section):
    """Options of every optimizer."""

    name: str = "adamw"
    """Name of the optimizer; set by optimizer=NAME."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up; the schedule determines the rest."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (norms, biases) are not decayed."""
    grad_clip: float = 1.0
    """Maximum gradient norm over the full model; 0: no clipping."""
    decay_lr: bool = True
    """nanoGPT's name: decay_lr=false means schedule=constant."""
    warmup_iters: int = 100
    """Number of linear warm-up steps."""
    lr_decay_iters: int | None = None
    """Step at which the schedule reaches min_lr; null: train.max_iters."""
    min_lr: float | None = None
    """Final learning rate; null: a tenth of learning_rate."""
    scale_lr: str = "none"
    """Scale learning_rate by the number of data-parallel ranks (linear), by its square root (sqrt), or not (none)."""
    gas: int | None = None
    """Older name of train.accumulation."""

    def problems(self) -> Iterable[str]:
        yield from positive("optimizer", self, "gas", "lr_decay_iters")
        yield from not_negative("optimizer", self, "warmup_iters", "grad_clip", "weight_decay", "min_lr")
        yield from above_zero("optimizer", self, "learning_rate")
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            yield f"optimizer.min_lr={self.min_lr} is above optimizer.learning_rate={self.learning_rate}"
        yield from one_of("optimizer.scale_lr", self.scale_lr, ["none", "sqrt", "linear"])

    def width_powers(self) -> tuple[float, float] | None:
        """Return the powers of the width with which muP scales the learning rates of hidden matrices and of all other
        parameters; None: they are not known for this optimizer.
        """
        return None

    def state_values(self, *, hidden: bool) -> tuple[int, int] | None:
        """Return how many values the optimizer keeps for each weight, and for each tensor; None: not known, so that
        memory cannot be planned.

        Args:
            hidden: for the hidden matrices, which Muon steps; False: for all other parameters.
        """
        return None


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay."""

    beta1: float = 0.9
    """Decay rate of the running mean of the gradients."""
    beta2: float = 0.99
    """Decay rate of the running mean of the squared gradients."""

    def problems(self) -> Iterable[str]:
        return [*super().problems(), *fractions("optimizer", self, "beta1", "beta2")]

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return two means for each weight, and a step count for each tensor."""
        return 2, 1

    def width_powers(self) -> tuple[float, float]:
        return -1.0, 0.0


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    name: str = "sgd"
    """Name of the optimizer; set by optimizer=NAME."""
    momentum: float = 0.9
    """Momentum factor; 0: no momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from fractions("optimizer", self, "momentum")
        if self.nesterov and not self.momentum:
            yield "optimizer.nesterov=true needs momentum: set optimizer.momentum=0.9, or nesterov=false"

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return one mean for each weight, if there is momentum."""
        return int(self.momentum != 0), 0

    def width_powers(self) -> tuple[float, float]:
        return 0.0, 1.0


@dataclass
class LionConfig(OptimizerConfig):
    """Lion: steps by the sign of a mean of the gradients, so that all weights change by the same amount."""

    name: str = "lion"
    """Name of the optimizer; set by optimizer=NAME."""
    learning_rate: float = 2e-4
    """Peak learning rate, reached at the end of the warm-up; a third to a tenth of AdamW's."""
    weight_decay: float = 0.5
    """Weight decay of matrices; larger than AdamW's by the factor by which the learning rate is smaller."""
    beta1: float = 0.9
    """Weight of the running mean in the step; the rest is the current gradient's."""
    beta2: float = 0.99
    """Decay rate of the running mean of the gradients."""

    def problems(self) -> Iterable[str]:
        return [*super().problems(), *fractions("optimizer", self, "beta1", "beta2")]

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return one mean for each weight."""
        return 1, 0

    def width_powers(self) -> tuple[float, float]:
        return -1.0, 0.0


@dataclass
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024): hidden matrices take orthogonal steps, computed from a running mean of the gradients.

    AdamW updates the embeddings, the output layer, norms and biases.
    """

    name: str = "muon"
    """Name of the optimizer; set by optimizer=NAME."""
    adamw_lr: float | None = None
    """Peak learning rate of AdamW; follows the same schedule as learning_rate. null: learning_rate."""
    adamw_weight_decay: float = 0.0
    """Weight decay of the embeddings and the output layer; weight_decay is that of the hidden matrices."""
    beta1: float = 0.9
    """AdamW's decay rate of the running mean of the gradients."""
    beta2: float = 0.99
    """AdamW's decay rate of the running mean of the squared gradients."""
    momentum: float = 0.95
    """Decay rate of Muon's running mean of the gradients."""
    momentum_start: float = 0.85
    """Momentum of the first step, if momentum_warmup is set."""
    momentum_warmup: int = 0
    """Number of steps over which the momentum grows linearly from momentum_start."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations of each step; more make the matrices closer to orthogonal."""
    ns_coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.775, 2.0315])
    """Coefficients a, b, c of a Newton-Schulz iteration, a X + b (X X') X + c (X X')^2 X: three numbers for all
    iterations, or three for each."""
    precision: str = "auto"
    """Precision of the Newton-Schulz iterations: fp32, bf16, or auto (bf16 on accelerators, fp32 on CPUs)."""
    split: str = "qkv"
    """How fused matrices are split before they are orthogonalized: qkv (queries, keys and values separately), heads
    (also each head) or none (the matrix as it is stored)."""
    scale: str = "adamw"
    """Factor of the steps of an n x m matrix: adamw (0.2 sqrt(max(n, m)): steps as large as AdamW's typical ones, so
    AdamW's learning rates can be kept) or spectral (sqrt(max(1, n / m)), for learning rates of about 0.02)."""
    cautious: bool = False
    """Decay only those weights of hidden matrices that the step moves towards 0."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from fractions("optimizer", self, "beta1", "beta2", "momentum", "momentum_start")
        yield from positive("optimizer", self, "ns_steps")
        yield from not_negative("optimizer", self, "momentum_warmup", "adamw_weight_decay")
        if self.adamw_lr is not None:
            yield from above_zero("optimizer", self, "adamw_lr")
        yield from one_of("optimizer.precision", self.precision, ["auto", "fp32", "bf16"])
        yield from one_of("optimizer.split", self.split, ["qkv", "heads", "none"])
        yield from one_of("optimizer.scale", self.scale, ["adamw", "spectral"])
        if len(self.ns_coefficients) not in (3, 3 * self.ns_steps):
            yield (
                f"optimizer.ns_coefficients has {len(self.ns_coefficients)} numbers: use 3, or 3 for each of the "
                f"optimizer.ns_steps={self.ns_steps} iterations"
            )

    def state_values(self, *, hidden: bool) -> tuple[int, int]:
        """Return one mean for each weight of hidden matrices, and what AdamW keeps for the others."""
        return (1, 0) if hidden else (2, 1)

    def width_powers(self) -> tuple[float, float]:
        """Return the powers of the width in the learning rates of hidden matrices and of all other parameters.

        The steps of scale=spectral have the same spectral norm at every width, and those of adamw grow with its root.
        """
        return -0.5 if self.scale == "adamw" else 0.0, 0.0

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if not cfg.backend.keeps_parameters:
            yield (
                f"optimizer=muon needs whole matrices, but train.backend={cfg.train.backend} flattens and shards them "
                "inside its engine: use train.backend=FSDP or DDP"
            )
