"""The strategies to compare, their memory, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from wordrun.backend.options import BackendConfig, DDPConfig, FSDPConfig, PPConfig, ThreeDConfig, TPConfig
from wordrun.common.errors import ConfigError, first_line
from wordrun.common.section import value_text
from wordrun.config import rules
from wordrun.config.registry import parts
from wordrun.config.schema import Config
from wordrun.plan.memory import Memory, memory
from wordrun.plan.options import Hardware
from wordrun.plan.parameter_shapes import ModelShapes, NoEstimateError
from wordrun.plan.strategy import Strategy
from wordrun.train.options import accumulation

AS_ASKED = "as asked"
"""Name of the strategy described by the config itself."""
# Names of strategies with torch's engines, by which recommendation.py chooses one.
WITHIN_NODES, LIKE_ZERO_2, LIKE_ZERO_3 = "FSDP within nodes", "FSDP like ZeRO-2", "FSDP, ZeRO-3"
OFFLOADED = "FSDP, offload"
TP_OVER_FSDP = "TP over FSDP"
DIVIDED = "FSDP, cp"
"""Name of the context-parallel strategy, which is tried if nothing fits that keeps sequences and layers whole."""
NO_LAYOUT = "no layout suits the model and the number of devices"
SHOWN_LAYOUTS = 3
"""Number of 3D layouts in the table."""


@dataclass(frozen=True)
class Estimate:
    """The estimated memory of a strategy."""

    strategy: Strategy
    memory: dict[str, Memory]
    """Memory by value of train.activation_checkpointing, from the configured one to the one that saves most."""
    fits: str | None
    """The first kind of checkpointing with which the strategy fits."""


@dataclass(frozen=True)
class Unavailable:
    """A strategy without an estimate."""

    name: str
    reason: str
    label: str = "impossible"
    """impossible (the options rule it out) or no estimate (the plan does not cover it)."""


class Estimator:
    """Estimates the strategies for one config on given hardware.

    Raises:
        ConfigError: the configured backend cannot run on the devices with the numbers of sequences in the config.
    """

    def __init__(self, cfg: Config, model: ModelShapes, hardware: Hardware) -> None:
        self.cfg, self.model, self.hardware = cfg, model, hardware
        configured = cfg.train.activation_checkpointing
        order = ["none", "selective", "full"]
        self.checkpointing = order[order.index(configured) :] if configured in order else [configured, "full"]
        layout = cfg.backend.layout(hardware.devices, hardware.per_node)
        if problems := list(rules.check_batch(cfg, layout.dp)):
            raise ConfigError("\n".join(problems))
        self.sequences = cfg.model.batch_size * layout.dp * accumulation(cfg, layout.dp)

    def estimate(self, strategy: Strategy) -> Estimate:
        """Return the estimate for ``strategy``.

        Raises:
            NoEstimateError: if the plan does not cover its backend or model.
        """
        kinds = dict.fromkeys([*self.checkpointing, "none", "full", "selective"])
        needs = {kind: memory(self.model, strategy, kind) for kind in kinds}
        room, host = self.hardware.usable, self.hardware.usable_host
        fits = [kind for kind in self.checkpointing if needs[kind].total <= room and needs[kind].host <= host]
        return Estimate(strategy, needs, fits[0] if fits else None)

    def strategy(self, name: str, backend: BackendConfig) -> Strategy:
        """Return the strategy for ``backend``, with the configured number of sequences per step.

        Raises:
            ConfigError: if the model, the batch or the devices rule it out.
        """
        cfg, hardware = self.cfg, self.hardware
        at = backend.layout(hardware.devices, hardware.per_node)
        overrides = _overrides(backend)
        sequences = at.dp * cfg.model.batch_size * (cfg.train.accumulation or 1)
        if sequences != self.sequences and not cfg.train.global_batch_size:
            overrides.append(f"train.global_batch_size={self.sequences}")
        train = replace(cfg.train, backend=backend.name, global_batch_size=self.sequences, accumulation=None)
        mine = replace(cfg, backend=backend, train=train)
        rules.check(mine, hardware.devices, hardware.per_node, runs_here=False)
        return Strategy(name, mine, at, tuple(overrides), hardware.on_cpu)

    def first_that_fits(self, name: str, backends: Iterable[BackendConfig]) -> Estimate | Unavailable:
        """Return the first of ``backends`` that fits with the least checkpointing, or else the last valid one."""
        found: list[Estimate] = []
        reason = NO_LAYOUT if self.hardware.devices > 1 else "there is only one device"
        label = "impossible"
        for backend in backends:
            try:
                found.append(self.estimate(self.strategy(name, backend)))
            except ConfigError as error:
                reason = first_line(error)
                label = "no estimate" if isinstance(error, NoEstimateError) else "impossible"
                continue
            if found[-1].fits == self.checkpointing[0]:
                break
        fit = [each for kind in self.checkpointing for each in found if each.fits == kind]
        return next(iter([*fit, *found[-1:]]), Unavailable(name, reason, label))

    def rows(self) -> list[Estimate | Unavailable]:
        """Return the strategies of every backend, starting with the configured one unless it is plain DDP."""
        single: dict[str, BackendConfig] = {AS_ASKED: self.cfg.backend} if self.cfg.backend != DDPConfig() else {}
        single |= {"DDP": DDPConfig(), LIKE_ZERO_2: FSDPConfig(reshard_after_forward=False)}
        single |= {LIKE_ZERO_3: FSDPConfig()}
        if self.hardware.nodes > 1 and self.hardware.per_node > 1:
            single |= {WITHIN_NODES: FSDPConfig(replicate=-1, shard=self.hardware.per_node)}
        if experts := getattr(self.cfg.model, "n_experts", 0):
            ranks = math.gcd(experts, self.hardware.per_node)
            single |= {"FSDP, experts over a node": FSDPConfig(ep=ranks)} if ranks > 1 else {}
        single |= {OFFLOADED: FSDPConfig(cpu_offload=True)}
        for part in parts("backend").values():
            single |= part.options.strategies()
        rows = [self.first_that_fits(name, [backend]) for name, backend in single.items()]
        tensor = (TPConfig(tp=tp) for tp in _divisors(self.hardware.per_node)[1:])
        if not any(isinstance(row, Estimate) and row.fits for row in rows) and self.hardware.devices > 1:
            divided = (FSDPConfig(cp=cp) for cp in _divisors(self.hardware.devices)[1:])
            rows.append(self.first_that_fits(DIVIDED, divided))
        rows.append(self.first_that_fits(TP_OVER_FSDP, tensor))
        rows.append(self.first_that_fits("PP", (PPConfig(pp=pp) for pp in self._pipeline_sizes())))
        return [*rows, *self._three_d()]

    def _pipeline_sizes(self) -> Iterator[int]:
        return (pp for pp in _divisors(self.hardware.devices)[1:] if pp <= self.model.cfg.n_layer)

    def _three_d(self) -> list[Estimate | Unavailable]:
        """Return the 3D layouts that fit, the least split first; if none fits, the last one tried."""
        devices, fit = self.hardware.devices, []
        tps = _divisors(self.hardware.per_node)[1:]
        sizes = [(pp, tp) for pp in self._pipeline_sizes() for tp in tps if devices % (pp * tp) == 0]
        last: Estimate | Unavailable = self.first_that_fits("3D", [])
        for pp, tp in sorted(sizes, key=lambda each: (math.prod(each), each[0])):
            sharded = ThreeDConfig(pp=pp, tp=tp)
            for options in (replace(sharded, replicate=-1, shard=1), sharded):
                found = self.first_that_fits("3D", [options])
                if isinstance(found, Estimate):
                    last = found
                    if found.fits:
                        fit.append(found)
                        break
                elif found.label == "no estimate":
                    return [found]
            if len(fit) == SHOWN_LAYOUTS:
                break
        return list(fit) or [last]


def _overrides(backend: BackendConfig) -> list[str]:
    """Return the overrides that select ``backend``."""
    default = type(backend)()
    changed = [f.name for f in fields(backend) if getattr(backend, f.name) != getattr(default, f.name)]
    changed = list(dict.fromkeys([*backend.always_shown, *changed]))
    values = {name: value_text(getattr(backend, name)) for name in changed}
    return [f"train.backend={backend.name}", *(f"backend.{name}={value}" for name, value in values.items())]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
