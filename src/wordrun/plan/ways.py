"""The ways to train a model on some devices, what each needs, and which to choose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from wordrun.checks import check
from wordrun.checks import layout as layout_of
from wordrun.config import (
    BackendConfig,
    Config,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    PPConfig,
    ThreeDConfig,
    TPConfig,
)
from wordrun.errors import ConfigError, first_line
from wordrun.plan.memory import Memory, Outline, Way, memory, numel
from wordrun.plan.options import Machine

MANY_NODES = 64
"""Above so many, gathering every layer from all nodes takes longer than a device computes on it, and 3D is tried."""
SHOWN_LAYOUTS = 3
"""3D layouts in the table."""


@dataclass(frozen=True)
class Estimate:
    """What a way needs."""

    way: Way
    memory: dict[str, Memory]
    """By train.activation_checkpointing, from least to most saving, beginning with the run's own."""
    fits: str | None
    """The first of those with which it fits."""


@dataclass(frozen=True)
class Impossible:
    """A way that the run's own options rule out."""

    name: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """What to do."""

    best: Estimate | None
    """None: nothing fits."""
    checkpointing: str
    why: list[str]
    alternative: Estimate | None = None
    """The same with DeepSpeed."""


class Planner:
    """Estimates the ways of one config on one machine."""

    def __init__(self, cfg: Config, model: Outline, machine: Machine) -> None:
        self.cfg, self.model, self.machine = cfg, model, machine
        mine = cfg.train.activation_checkpointing
        order = ["none", "selective", "full"]
        self.kinds = [mine, *order[order.index(mine) + 1 :]] if mine in order else [mine, "full"]
        whole = layout_of(cfg.backend, machine.devices, machine.per_node)
        self.sequences = cfg.train.global_batch_size or cfg.model.batch_size * whole.dp * (cfg.optimizer.gas or 1)

    def estimate(self, way: Way) -> Estimate:
        """Return what ``way`` needs."""
        needs = {kind: memory(self.model, way, kind) for kind in dict.fromkeys([*self.kinds, "none", "full"])}
        needs |= {"selective": memory(self.model, way, "selective")}
        room, host = self.machine.usable, self.machine.usable_host
        fits = [kind for kind in self.kinds if needs[kind].total <= room and needs[kind].host <= host]
        return Estimate(way, needs, fits[0] if fits else None)

    def way(self, name: str, backend: BackendConfig) -> Way:
        """Return the way to train under ``backend``, with as many sequences in a step as the run has.

        Raises:
            ConfigError: the model, the batch or the devices do not go with it.
        """
        cfg, machine = self.cfg, self.machine
        at = layout_of(backend, machine.devices, machine.per_node)
        model, words = cfg.model, _words(backend)
        if self.model.vocab_size % at.tp and model.vocab_size is None:
            rows = math.ceil(self.model.vocab_size / at.tp) * at.tp
            model = replace(model, vocab_size=rows)
            words.append(f"model.vocab_size={rows}")
        if at.dp * model.batch_size * (cfg.optimizer.gas or 1) != self.sequences and not cfg.train.global_batch_size:
            words.append(f"train.global_batch_size={self.sequences}")
        mine = replace(
            cfg,
            model=model,
            backend=backend,
            train=replace(cfg.train, backend=backend.name, global_batch_size=self.sequences),
            optimizer=replace(cfg.optimizer, gas=None),
        )
        # DeepSpeed need not be installed for a plan, and its batch is that of DDP.
        checked = replace(mine, backend=DDPConfig(), train=replace(mine.train, backend="DDP"))
        check(checked if isinstance(backend, DeepSpeedConfig) else mine, machine.devices, machine.per_node)
        return Way(name, mine, at, tuple(words), machine.on_cpu)

    def first_that_fits(self, name: str, backends: Iterable[BackendConfig]) -> Estimate | Impossible:
        """Return the first of ``backends`` that fits with the least checkpointing; if none does, the last possible."""
        found: list[Estimate] = []
        reason = "no layout suits the model and the number of devices"
        for backend in backends:
            try:
                found.append(self.estimate(self.way(name, backend)))
            except ConfigError as error:
                reason = first_line(error)
                continue
            if found[-1].fits == self.kinds[0]:
                break
        fit = [each for kind in self.kinds for each in found if each.fits == kind]
        return next(iter([*fit, *found[-1:]]), Impossible(name, reason))

    def rows(self) -> list[Estimate | Impossible]:
        """Return every backend's ways, the one that the config itself asks for first if it is not plain DDP."""
        single: list[tuple[str, BackendConfig]] = [("DDP", DDPConfig())]
        if self.cfg.backend != DDPConfig():
            single.insert(0, ("as asked", self.cfg.backend))
        single.append(("FSDP like ZeRO-2", FSDPConfig(reshard_after_forward=False)))
        single.append(("FSDP, ZeRO-3", FSDPConfig()))
        if self.machine.nodes > 1 and self.machine.per_node > 1:
            single.append(("FSDP within nodes", self.hybrid))
        single.append(("FSDP, offload", FSDPConfig(cpu_offload=True)))
        single += [(f"ZeRO-{stage}", DeepSpeedConfig(stage=stage)) for stage in (1, 2, 3)]
        single.append(("ZeRO-2, offload", DeepSpeedConfig(stage=2, offload_optimizer=True)))
        single.append(("ZeRO-3, offload", DeepSpeedConfig(stage=3, offload_optimizer=True, offload_params=True)))
        rows = [self.first_that_fits(name, [backend]) for name, backend in single]
        rows.append(self.first_that_fits("TP over FSDP", self._tensor_parallel()))
        rows.append(self.first_that_fits("PP", self._pipelines()))
        return [*rows, *self._three_d()]

    @property
    def hybrid(self) -> FSDPConfig:
        """FSDP that shares each copy of the model within a node."""
        return FSDPConfig(replicate=-1, shard=self.machine.per_node)

    def _tensor_parallel(self) -> Iterator[BackendConfig]:
        for tp in _divisors(self.machine.per_node)[1:]:
            yield TPConfig(tp=tp)

    def _pipelines(self) -> Iterator[BackendConfig]:
        for pp in _divisors(self.machine.devices)[1:]:
            if pp <= self.model.cfg.n_layer:
                yield PPConfig(pp=pp)

    def _three_d(self) -> list[Estimate | Impossible]:
        """Return the layouts that fit, those first that cut the model into the fewest pieces; or the least bad one."""
        devices, fit = self.machine.devices, []
        sizes = [
            (pp, tp)
            for pp in _divisors(devices)[1:]
            for tp in _divisors(self.machine.per_node)[1:]
            if pp <= self.model.cfg.n_layer and devices % (pp * tp) == 0
        ]
        worst: Estimate | Impossible = Impossible("3D", "no layout suits the model and the number of devices")
        for pp, tp in sorted(sizes, key=lambda each: (math.prod(each), each[0])):
            for options in (ThreeDConfig(pp=pp, tp=tp, replicate=-1, shard=1), ThreeDConfig(pp=pp, tp=tp)):
                found = self.first_that_fits("3D", [options])
                if isinstance(found, Estimate):
                    worst = found
                    if found.fits:
                        fit.append(found)
                        break
            if len(fit) == SHOWN_LAYOUTS:
                break
        return list(fit) or [worst]


def advise(planner: Planner, rows: Sequence[Estimate | Impossible]) -> Advice:
    """Return which of ``rows`` to choose, by the decision tree of ALCF's talk on parallel training.

    A model that fits one device: DDP. One that does not: FSDP or ZeRO, then with offload. One whose largest layer does
    not: tensor parallel. Many nodes: 3D. Before the next branch, activation checkpointing is tried, which costs at most
    one more forward pass, or a third of the operations.
    """
    machine, kinds = planner.machine, planner.kinds
    ways = [row for row in rows if isinstance(row, Estimate) and row.way.name != "as asked"]

    def pick(names: Sequence[str], tried: Sequence[str] = kinds) -> tuple[Estimate, str] | None:
        """Return the first that fits: of all ways with the least checkpointing first."""
        for kind in tried:
            for name in names:
                for row in ways:
                    if row.way.name == name and row.fits and kinds.index(row.fits) <= kinds.index(kind):
                        return row, kind
        return None

    devices = f"{machine.kind} of {machine.memory:g} GiB, {machine.reserve:.0%} of it left free"
    alone = pick(["DDP"], kinds[:1] if machine.devices > 1 else kinds)
    if alone:
        why = [f"The whole model fits one {devices}{': ranks average gradients alone' * (machine.devices > 1)}."]
        return Advice(alone[0], alone[1], [*why, *_price(alone[1], kinds)])
    how = "" if kinds[0] != "none" else " as it is"
    why = [f"The whole model{how} does not fit one {devices}."]
    sharded = ["FSDP within nodes", "FSDP like ZeRO-2", "FSDP, ZeRO-3"]
    if machine.nodes > MANY_NODES:
        inside = pick(sharded[:1])
        if inside:
            why.append(f"A node's {machine.per_node} devices together can hold it: no layer is gathered across nodes.")
            return Advice(inside[0], inside[1], [*why, *_price(inside[1], kinds)])
        layered = pick(["3D"])
        if layered:
            why.append(
                f"{machine.nodes} nodes are many to gather every layer from: stages of a pipeline speak least, and the "
                "ranks that share matrix products are neighbours on a node."
            )
            return Advice(layered[0], layered[1], [*why, *_price(layered[1], kinds)])
    shared = pick(["DDP", *sharded]) or pick(["FSDP, offload"])
    if shared and shared[0].way.name == "DDP":
        return Advice(shared[0], shared[1], [*why, *_price(shared[1], kinds)])
    if shared:
        row, kind = shared
        where = "the host's memory" if row.way.name == "FSDP, offload" else "their shares of it"
        why.append(f"Its largest layer does, and the ranks keep parameters, gradients and optimizer state in {where}.")
        other = pick(["ZeRO-2, offload", "ZeRO-3, offload"] if "offload" in row.way.name else ["ZeRO-2", "ZeRO-3"])
        return Advice(row, kind, [*why, *_price(kind, kinds)], other[0] if other else None)
    offloaded = pick(["ZeRO-2, offload", "ZeRO-3, offload"])
    if offloaded:
        why.append("There is nobody to share it with; DeepSpeed can keep part of it in the host's memory.")
        return Advice(offloaded[0], offloaded[1], [*why, *_price(offloaded[1], kinds)])
    cut = pick(["TP over FSDP"]) or pick(["3D"]) or pick(["PP"])
    if cut:
        why.append("Nor does one layer with its activations at a time: the ranks of a node share each matrix product.")
        return Advice(cut[0], cut[1], [*why, *_price(cut[1], kinds)])
    return Advice(None, kinds[0], [*why, *_remedies(planner, ways)])


def _price(checkpointing: str, kinds: Sequence[str]) -> list[str]:
    if checkpointing == kinds[0]:
        return []
    what = "all but the matrix products" if checkpointing == "selective" else "a third of the operations"
    return [f"It fits with activation checkpointing, which computes {what} again."]


def _remedies(planner: Planner, ways: Sequence[Estimate]) -> list[str]:
    """Return what would have to change, where nothing fits."""
    least = min(ways, key=lambda row: row.memory[planner.kinds[-1]].total)
    need = least.memory[planner.kinds[-1]]
    size = planner.cfg.model.batch_size
    advice = [
        f"Nothing fits. {least.way.name} with train.activation_checkpointing={planner.kinds[-1]} comes nearest: "
        f"{need.total / 2**30:.1f} GiB of {planner.machine.usable / 2**30:.1f}."
    ]
    if need.host > planner.machine.usable_host:
        advice.append(f"It also needs {need.host / 2**30:.1f} GiB of the host's memory for each device.")
    changing = need.activations + max(need.logits, need.block)
    if changing > need.total / 2 and size > 1:
        advice.append(f"Most of it goes with the batch: try model.batch_size={size // 2} with optimizer.gas doubled.")
    else:
        advice.append(f"Try more than plan.devices={planner.machine.devices}.")
    return advice


def largest_layer(model: Outline) -> tuple[str, int]:
    """Return name and parameters of what has to be whole on a device at a time, unless matrices are shared."""
    sizes = {
        "block": numel(model.block), "embedding": numel(model.first), "output layer": numel(model.last),
    }  # fmt: skip
    return max(sizes.items(), key=lambda each: each[1])


def _words(backend: BackendConfig) -> list[str]:
    """Return the overrides that make ``backend``."""
    usual = type(backend)()
    changed = [f.name for f in fields(backend) if getattr(backend, f.name) != getattr(usual, f.name)]
    if isinstance(backend, DeepSpeedConfig):
        changed = list(dict.fromkeys(["stage", *changed]))
    return [f"train.backend={backend.name}", *(f"backend.{n}={_value(getattr(backend, n))}" for n in changed)]


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
