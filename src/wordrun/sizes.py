"""The numbers of ranks with which a run can continue under ``launch --elastic MIN``, at the same global batch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

from wordrun.checks import accumulation, check
from wordrun.config import Config
from wordrun.errors import ConfigError
from wordrun.layouts import layout

VARIABLE = "WORDRUN_ELASTIC"
"""Set by ``launch``: MIN, the number of ranks with which the launch began, and how many of them a node has."""


@dataclass(frozen=True)
class Asked:
    """What ``launch`` says."""

    least: int
    most: int
    per_node: int


def asked() -> Asked | None:
    """Return what ``launch --elastic MIN`` says; None: it was not started that way."""
    words = os.environ.get(VARIABLE, "").split()
    return Asked(*map(int, words)) if words else None


def accepted(cfg: Config) -> list[int] | None:
    """Return the numbers of ranks with which a run of ``cfg`` can train, MIN or more; None: without --elastic MIN.

    Raises:
        ConfigError: there is none below the number with which it begins.
    """
    if (want := asked()) is None:
        return None
    sizes = [n for n in range(want.least, want.most) if _fits(cfg, want, n)]
    if not sizes:
        smaller = [n for n in range(1, want.least) if _fits(cfg, want, n)]
        try:
            _on(cfg, want, max(want.least, want.most // 2))
            why = ""
        except ConfigError as error:
            why = f" ({str(error).splitlines()[0].partition(': use ')[0]})"
        remedy = f"use --elastic {smaller[-1]}, since {_listed(smaller)} would work" if smaller else _remedy(cfg, want)
        tried = f"{want.least} to {want.most - 1}" if want.least < want.most - 1 else f"{want.least}"
        raise ConfigError(
            f"--elastic {want.least}: the run cannot continue with {tried} of its {want.most} ranks{why}: {remedy}"
        )
    return [*sizes, want.most]


def fit(cfg: Config, ranks: int) -> Config:
    """Return ``cfg`` for ``ranks`` ranks with the global batch of the number with which the launch began.

    Raises:
        ConfigError: it does not suit them.
    """
    want = asked()
    return cfg if want is None or ranks == want.most else _on(cfg, want, ranks)


def _on(cfg: Config, want: Asked, ranks: int) -> Config:
    if cfg.backend.own_engine:
        raise ConfigError(f"train.backend={cfg.train.backend} resumes on the same number of ranks only")
    if cfg.optimizer.scale_lr != "none":
        raise ConfigError(f"optimizer.scale_lr={cfg.optimizer.scale_lr} changes the learning rate with the ranks")
    full = layout(cfg.backend, want.most, want.per_node)
    batch = cfg.train.global_batch_size or accumulation(cfg, full.dp) * cfg.model.batch_size * full.dp
    at = layout(cfg.backend, ranks, min(want.per_node, ranks))
    common = math.gcd(batch, *(size for _, size in cfg.train.ramp()))
    if common % at.dp:
        raise ConfigError(f"{common} sequences per step cannot be divided among {at.dp} data-parallel ranks")
    size, each = cfg.model.batch_size, common // at.dp
    if not cfg.backend.pipeline:  # otherwise it is what the schedule divides
        size = next(n for n in range(size, 0, -1) if each % n == 0)
    made = replace(
        cfg, model=replace(cfg.model, batch_size=size), train=replace(cfg.train, global_batch_size=batch),
        optimizer=replace(cfg.optimizer, gas=None),
    )  # fmt: skip
    check(made, ranks, min(want.per_node, ranks))
    return made


def _fits(cfg: Config, want: Asked, ranks: int) -> bool:
    try:
        _on(cfg, want, ranks)
    except ConfigError:
        return False
    return True


def _remedy(cfg: Config, want: Asked) -> str:
    """Return the remedy, if possible the number of ranks at which a run of ``cfg`` could lose some."""
    for most in range(want.most + 1, 4 * want.most + 1):
        more = replace(want, most=most)
        plain = replace(cfg, train=replace(cfg.train, global_batch_size=None))
        sizes = [n for n in range(want.least, most) if _fits(plain, more, n)]
        if sizes and _fits(plain, more, most):
            return f"start {most} ranks, which can continue with {_listed(sizes)}, or leave MIN out"
    return "use another train.backend or train.global_batch_size, or leave MIN out"


def _listed(sizes: list[int]) -> str:
    few = [str(n) for n in sizes[-4:]]
    return " or ".join(few)
