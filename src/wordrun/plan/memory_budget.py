"""What to recompute so that a run needs no more memory than its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from wordrun.common.errors import ConfigError
from wordrun.config.schema import Config
from wordrun.plan.memory import memory
from wordrun.plan.memory_fit import TOLERANCE, Fit, Room
from wordrun.plan.parameter_shapes import NoEstimateError
from wordrun.plan.strategy import Strategy

GB = 1e9


def within_budget(fit: Fit) -> Fit:
    """Return ``fit`` with the train.activation_checkpointing that train.memory_budget_gb requires, if that is set.

    Raises:
        ConfigError: there is none, or no estimate.
    """
    budget = fit.cfg.train.memory_budget_gb
    if budget is None:
        return fit
    needs = {}
    for setting in settings(fit.cfg):
        train = replace(fit.cfg.train, activation_checkpointing=setting, memory_budget_gb=None)
        tried = replace(fit, cfg=replace(fit.cfg, train=train))
        try:
            strategy = Strategy("", tried.cfg, tried.layout, on_cpu=tried.on_cpu)
            needs[setting] = memory(tried.model, strategy, setting).total / GB
        except NoEstimateError as error:
            raise ConfigError(
                f"train.memory_budget_gb={budget:g} needs an estimate of the memory, but there is {error}: set "
                "train.activation_checkpointing"
            ) from None
        if needs[setting] <= budget:
            return tried
    least = min(needs, key=lambda setting: needs[setting])
    raise ConfigError(
        "\n".join(
            [
                f"train.memory_budget_gb={budget:g}: this run needs at least {needs[least]:.4g} GB on each rank, with "
                f"train.activation_checkpointing={least}.",
                *tried.remedies(Room(budget * GB * TOLERANCE)),
            ]
        ),
        page="plan.md#a-memory-budget",
    )


def settings(cfg: Config) -> Iterator[str]:
    """Yield values of train.activation_checkpointing, each of which needs less memory and recomputes more.

    Pipelines recompute the same in all blocks, or the stages would take different times.
    """
    blocks = range(1, cfg.transformer.n_layer)
    yield "none"
    if cfg.backend.zero_bubble:
        return
    if not cfg.backend.pipeline:
        yield from (f"selective:{count}" for count in blocks)
    yield "selective"
    if not cfg.backend.pipeline:
        yield from (f"full:{count}+selective:{len(blocks) + 1 - count}" for count in blocks)
    yield "full"
