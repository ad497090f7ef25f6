"""A strategy: a backend with its options, a layout and a batch, whose memory and traffic are estimated."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wordrun.backend.options import BackendConfig
from wordrun.config.schema import Config
from wordrun.dist.mesh import Layout
from wordrun.plan.parameter_shapes import NoEstimateError
from wordrun.train.options import accumulation

FP32 = 4


@dataclass(frozen=True)
class Strategy:
    """A way to train the model on the devices."""

    name: str
    cfg: Config
    """The config with the strategy's backend and batch size, and auto precision resolved."""
    layout: Layout
    overrides: tuple[str, ...] = ()
    """The command-line overrides that select it."""
    on_cpu: bool = False

    @property
    def backend(self) -> BackendConfig:
        """The backend options."""
        return self.cfg.backend

    @property
    def gas(self) -> int:
        """Micro-steps per optimizer step."""
        return accumulation(self.cfg, self.layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens per micro-step and rank."""
        return self.cfg.model.batch_size * self.cfg.transformer.block_size // self.layout.cp

    @property
    def compute(self) -> int:
        """Bytes per element in matrix products."""
        return FP32 if self.cfg.train.dtype == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream: autocast in fp16, without sharding, leaves it in fp32."""
        if self.cfg.train.dtype != "fp16":
            return self.compute
        unsharded = self.backend.sharded and self.layout.dp * self.layout.cp == 1
        return FP32 if unsharded or self.backend.replicated else self.compute


def on_island(strategy: Strategy, inside: BackendConfig) -> Strategy:
    """Return the strategy of a single island of ``strategy``, with the backend ``inside``."""
    cfg = strategy.cfg
    train = replace(cfg.train, global_batch_size=None, accumulation=strategy.gas)
    mine = replace(cfg, backend=inside, train=train)
    return replace(strategy, cfg=mine, layout=strategy.layout.of_island)


def registered(estimate: Callable[..., Any], options: BackendConfig) -> None:
    """Import the module that registers the function for ``options`` with ``estimate``, a ``functools.singledispatch``.

    Raises:
        NoEstimateError: the plan does not cover this backend.
    """
    dispatch = estimate.dispatch  # type: ignore[attr-defined]
    if options.estimates:
        importlib.import_module(options.estimates)
    if dispatch(type(options)) is dispatch(object):
        raise NoEstimateError(f"no estimate for train.backend={options.name}")
