"""Options of hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from wordrun.common.section import Section
from wordrun.common.validation import above_zero, fractions, metric_of, not_negative, positive


@dataclass
class HookConfig(Section):
    """Options of a hook, which the trainer calls between steps."""

    @property
    def metric_needed(self) -> str:
        """The metric that evaluations have to report for the hook, such as val_accuracy; empty: none."""
        return ""


@dataclass
class EarlyStopConfig(HookConfig):
    """End the run when a metric of the evaluations no longer improves."""

    metric: str = "val_loss"
    """Metric of an evaluation, such as val_accuracy."""
    mode: str = "auto"
    """Which values of the metric are better: min, max, or auto (known from its name)."""
    patience: int = 5
    """Number of consecutive evaluations without improvement after which the run ends."""
    min_delta: float = 0.0
    """Smallest change of the metric that counts as an improvement; the loss of text is in nats per token."""

    @property
    def metric_needed(self) -> str:
        """The metric that has to improve."""
        return self.metric

    def problems(self) -> Iterable[str]:
        yield from positive("hooks.early_stop", self, "patience")
        yield from not_negative("hooks.early_stop", self, "min_delta")
        yield from metric_of("hooks.early_stop.metric", self.metric, self.mode, "hooks.early_stop.mode")

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if not cfg.train.eval_interval:
            yield "hooks=[early_stop] needs evaluations, but train.eval_interval=0: set it above 0"


@dataclass
class EMAConfig(HookConfig):
    """Exponential moving average of the weights, kept beside the model and saved in checkpoints."""

    decay: float = 0.999
    """Fraction of the average that each update keeps; at most (1 + n) / (10 + n) in update n, to forget the first."""
    interval: int = 1
    """Steps between updates."""
    evaluate: bool = True
    """Also evaluate the averaged weights: ema_val_loss, and each metric as ema_val_NAME."""

    def problems(self) -> Iterable[str]:
        return [*fractions("hooks.ema", self, "decay"), *positive("hooks.ema", self, "interval")]

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if not cfg.backend.keeps_parameters:
            yield (
                f"hooks=[ema] cannot average the weights of train.backend={cfg.train.backend}, which are flattened and "
                "sharded inside its engine: use train.backend=DDP or FSDP"
            )
        if not cfg.backend.synchronous:
            yield (
                f"hooks=[ema] averages the weights of all ranks, and train.backend={cfg.train.backend} has others on "
                "each island: omit it, since the outer weights are already an average, or use train.backend=DDP or FSDP"
            )


@dataclass
class StatisticsConfig(HookConfig):
    """Statistics of the gradients and the activations of each layer."""

    interval: int = 100
    """Steps between measurements."""
    gradients: bool = True
    """Norm and largest absolute value of each layer's gradients, before clipping."""
    activations: bool = True
    """Root mean square and largest absolute value of each block's output."""

    def problems(self) -> Iterable[str]:
        return positive("hooks.statistics", self, "interval")

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if self.gradients and not cfg.backend.keeps_parameters:
            yield (
                f"hooks=[statistics] cannot read the gradients of train.backend={cfg.train.backend}, which its engine "
                "flattens: use hooks.statistics.gradients=false, or train.backend=DDP or FSDP"
            )
        if self.activations and cfg.train.compile is True:
            yield (
                "hooks=[statistics] cannot read activations inside compiled blocks: use "
                "hooks.statistics.activations=false, or train.compile=false"
            )


@dataclass
class CoordinatesConfig(HookConfig):
    """Size of each layer's activations, and of their change since the first step.

    wordrun study coord compares them across widths.
    """

    interval: int = 1
    """Steps between measurements."""

    def problems(self) -> Iterable[str]:
        return positive("hooks.coordinates", self, "interval")

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if cfg.train.compile is True:
            yield "hooks=[coordinates] cannot read activations inside compiled blocks: use train.compile=false"


@dataclass
class SpikesConfig(HookConfig):
    """How many standard deviations the training loss is above its mean over the preceding steps."""

    window: int = 128
    """Number of preceding steps; there is no score until there are as many."""
    threshold: float = 6.0
    """Score from which a step counts as a spike, which is logged."""

    def problems(self) -> Iterable[str]:
        yield from above_zero("hooks.spikes", self, "threshold")
        if self.window < 2:
            yield f"hooks.spikes.window={self.window} should be at least 2"


@dataclass
class LRRangeConfig(HookConfig):
    """Learning-rate range test: raise the learning rate geometrically, find where the loss falls fastest, and end."""

    lowest: float = 1e-6
    """First learning rate."""
    highest: float = 1.0
    """Last learning rate, unless the loss diverges before."""
    steps: int = 100
    """Number of steps from the first to the last learning rate."""

    def problems(self) -> Iterable[str]:
        yield from above_zero("hooks.lr_range", self, "lowest", "highest")
        if self.lowest >= self.highest:
            yield f"hooks.lr_range.lowest={self.lowest:g} should be below hooks.lr_range.highest={self.highest:g}"
        if self.steps < 10:
            yield f"hooks.lr_range.steps={self.steps} should be at least 10"

    def conflicts(self, cfg: Any) -> Iterable[str]:
        for option, what in (("checkpoint_interval", "saved"), ("eval_interval", "evaluated")):
            if getattr(cfg.train, option):  # the hook's file sets 0, which an experiment overrides
                yield (
                    f"hooks=[lr_range] trains until the model diverges, which should not be {what}: use "
                    f"train.{option}=0"
                )
        if self.steps > cfg.train.max_iters:
            yield (
                f"hooks.lr_range.steps={self.steps} is more than train.max_iters={cfg.train.max_iters}: raise "
                "train.max_iters, or take fewer steps"
            )
