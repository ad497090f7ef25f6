"""Compares what one run needs with the memory of its ranks, and finds changes with which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wordrun.backend.options import FSDPConfig
from wordrun.common.errors import ConfigError
from wordrun.config.rules import check
from wordrun.config.schema import Config
from wordrun.dist.mesh import Layout
from wordrun.plan.memory import Memory, memory
from wordrun.plan.parameter_shapes import ModelShapes, NoEstimateError
from wordrun.plan.strategy import FP32, Strategy
from wordrun.train.options import accumulation

GB = 1e9
TOLERANCE = 1.2
"""Factor by which an estimate may be too high or too low; tests compare it with measurements."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
"""The parts of a Memory to show."""


@dataclass(frozen=True)
class Room:
    """The memory that one rank may use, in bytes."""

    device: float
    """On its device; on a CPU, in host memory."""
    host: float = float("inf")
    """In host memory, for offloaded data."""

    def scaled(self, factor: float) -> Room:
        """Return ``factor`` times this much memory."""
        return Room(self.device * factor, self.host * factor)

    def holds(self, need: Memory) -> bool:
        """Return whether a rank that needs ``need`` fits."""
        return need.total <= self.device and need.host <= self.host


@dataclass(frozen=True)
class Fit:
    """One run on given ranks, and what it needs."""

    cfg: Config
    """The config, with auto precision resolved."""
    model: ModelShapes
    layout: Layout
    per_node: int
    """Ranks per node."""
    on_cpu: bool

    @property
    def need(self) -> Memory:
        """The memory of the rank that needs most."""
        return self._need(self.cfg, self.layout)

    def may_fit(self, room: Room) -> bool:
        """Return whether the run could fit into ``room``: whether it fits if the estimate is too high by TOLERANCE."""
        # Compiled blocks save fewer activations; how many is unknown.
        need = replace(self.need, activations=0.0, block=0.0) if self.cfg.train.compile is True else self.need
        return room.scaled(TOLERANCE).holds(need)

    def fits(self, room: Room) -> bool:
        """Return whether the run surely fits into ``room``: whether it fits if the estimate is too low by TOLERANCE."""
        return room.scaled(1 / TOLERANCE).holds(self.need)

    def remedies(self, room: Room) -> list[str]:
        """Return sentences about changes with which the run surely fits into ``room``."""
        room = room.scaled(1 / TOLERANCE)
        size, found = self._largest_batch(room), []
        if 0 < size < self.cfg.model.batch_size:
            found.append(f"The largest model.batch_size that fits is {size}{self._same_step(size)}.")
        found += [
            f"With {overrides} the run fits at its batch size."
            for overrides, cfg, at in self._alternatives()
            if room.holds(self._need(cfg, at))
        ]
        if found:
            return found
        found = [
            f"A sequence of {self.cfg.transformer.block_size} tokens does not fit on one rank; with {overrides} the "
            "run fits."
            for overrides, cfg, at in self._divided_sequences()
            if room.holds(self._need(cfg, at))
        ]
        if found:
            return found[:1]
        batch = "fewer sequences per step, " if self.cfg.backend.pipeline else ""
        sizes = "model.depth" if getattr(self.cfg.model, "depth", None) else "model.n_layer, model.n_embd"
        return [
            f"It does not fit with model.batch_size=1 either: use {batch}a smaller model ({sizes}), shorter sequences "
            "(model.block_size), or more ranks with train.backend=FSDP."
        ]

    def _largest_batch(self, room: Room) -> int:
        """Return the largest model.batch_size up to the configured one that fits into ``room``; 0: none."""
        cfg, unit = self.cfg, self._unit
        low, high = 0, cfg.model.batch_size // unit
        while low < high:
            middle = (low + high + 1) // 2
            fits = room.holds(self._need(self._with_batch(middle * unit), self.layout))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * unit

    @property
    def _unit(self) -> int:
        """The number that model.batch_size must be a multiple of."""
        return self.cfg.backend.microbatches_of(self.cfg.model.batch_size, self.layout.pp)

    @property
    def _per_rank(self) -> int:
        """Sequences per optimizer step of each data-parallel rank."""
        return self.cfg.model.batch_size * accumulation(self.cfg, self.layout.dp)

    def _with_batch(self, size: int) -> Config:
        """Return the config with another batch size, and about the same number of sequences per step."""
        cfg, gas = self.cfg, -(-self._per_rank // size)
        train = replace(cfg.train, global_batch_size=None, accumulation=gas)
        return replace(cfg, model=replace(cfg.model, batch_size=size), train=train)

    def _same_step(self, most: int) -> str:
        """Return how to keep the number of sequences per step with a batch size of at most ``most``."""
        sequences = self._per_rank * self.layout.dp
        size = next(n for n in range(most, 0, -1) if self._per_rank % n == 0 and (n % self._unit == 0 or n == 1))
        return f"; model.batch_size={size} train.global_batch_size={sequences} keeps {sequences} sequences per step"

    def _alternatives(self) -> Iterator[tuple[str, Config, Layout]]:
        """Yield overrides that save memory, with their config and layout."""
        cfg = self.cfg
        full = replace(cfg, train=replace(cfg.train, activation_checkpointing="full"))
        if not cfg.backend.zero_bubble:
            yield "train.activation_checkpointing=full", full, self.layout
        if cfg.backend.replicated and self.layout.size > 1:
            at = FSDPConfig().layout(self.layout.size, self.per_node)
            yield "train.backend=FSDP", replace(cfg, backend=FSDPConfig()), at
            both = "train.backend=FSDP train.activation_checkpointing=full"
            yield both, replace(full, backend=FSDPConfig()), at

    def _divided_sequences(self) -> Iterator[tuple[str, Config, Layout]]:
        """Yield overrides with which ranks divide each sequence, with their config and layout; the fewest ranks first.

        The number of sequences per step stays the same.
        """
        cfg, sequences = self.cfg, self._per_rank * self.layout.dp
        if not (cfg.backend.replicated or cfg.backend.name == "FSDP"):
            return
        train = replace(cfg.train, backend="FSDP", global_batch_size=sequences, accumulation=None)
        model = replace(cfg.model, batch_size=1)
        given = cfg.backend if isinstance(cfg.backend, FSDPConfig) else FSDPConfig()
        for cp in (n for n in range(2, self.layout.size + 1) if self.layout.size % n == 0):
            backend = replace(given, cp=cp)
            divided = replace(cfg, backend=backend, train=train, model=model)
            try:
                at = check(divided, self.layout.size, self.per_node)
            except ConfigError:
                continue
            overrides = f"train.backend=FSDP backend.cp={cp} model.batch_size=1 train.global_batch_size={sequences}"
            yield overrides, divided, at

    def _need(self, cfg: Config, at: Layout) -> Memory:
        """Return the estimate; if the plan has none, a lower bound."""
        try:
            strategy = Strategy("", cfg, at, on_cpu=self.on_cpu)
            return memory(self.model, strategy, cfg.train.activation_checkpointing)
        except NoEstimateError:
            # Under DDP every rank has all parameters and gradients, whatever else the model and the optimizer need.
            size = float(FP32 * self.model.parameters) if cfg.backend.replicated else 0.0
            return Memory(size, size, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def table(need: Memory) -> list[str]:
    """Return lines with the parts of ``need``."""
    lines = [f"  {name:<12}{gib(getattr(need, name)):>12}" for name in PARTS]
    note = "(with the backward pass of one block; the parts do not all peak at the same time)"
    return [*lines, f"  {'peak':<12}{gib(need.total):>12}  {note}"]


def readable(size: float) -> str:
    """Return a number of bytes in GiB, or in MiB below 1 GiB."""
    return gib(size) if size >= 2**30 else f"{size / 2**20:,.{1 if size < 100 * 2**20 else 0}f} MiB"


def gib(size: float) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / 2**30:,.2f} GiB" if size < 100 * 2**30 else f"{size / 2**30:,.0f} GiB"


@dataclass(frozen=True)
class Comparison:
    """What a run needs, and what the ranks with the least memory have."""

    fit: Fit
    room: Room
    host: str
    """Name of these ranks' host."""
    device: str = "cpu"
    """Kind of device: cpu, cuda or xpu."""
    device_name: str = ""
    """The driver's name for an accelerator."""

    def __str__(self) -> str:
        need, room, host, per_node = self.fit.need, self.room, self.host, self.fit.per_node
        if need.total <= room.device and need.host > room.host:
            needs, has = f"{gib(need.host)} of host memory", f"{host} has {gib(room.host)} for each"
        elif self.device == "cpu":
            shared = f" for each of its {per_node} ranks" if per_node > 1 else ""
            needs, has = gib(need.total), f"{host} has {gib(room.device)} available{shared}"
        else:
            needs, has = gib(need.total), f"the {self.device_name} on {host} has {gib(room.device)} free"
        return f"this run needs about {needs} on each rank, and {has}"

    def check(self) -> None:
        """Stop the run if it cannot fit, unless train.check_memory is false.

        Raises:
            ConfigError: it cannot fit; the message says what takes the memory, and what would fit.
        """
        if self.fit.cfg.train.check_memory and not self.fit.may_fit(self.room):
            off = "train.check_memory=false starts it anyway."
            raise ConfigError(
                "\n".join([f"not enough memory: {self}", *self.advice(self.room), off]), page="plan.md#before-every-run"
            )

    def advice(self, room: Room) -> list[str]:
        """Return lines about what takes the memory, and what would fit into ``room``."""
        ranks, per_node = self.fit.layout.size, self.fit.per_node
        plan = f"wordrun plan plan.device={self.device} plan.ranks={ranks} plan.per_node={per_node}"
        if self.room.device < 2**50:  # else it is unknown
            sharing = per_node if self.device == "cpu" else 1
            plan += f" plan.memory={self.room.device * sharing / 2**30:.1f}"
        return [
            "Estimated for each rank:",
            *table(self.fit.need),
            *self.fit.remedies(room),
            f"For all backends: {plan}, with this run's options.",
        ]


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

    Pipelines recompute the same in all blocks; otherwise stages would take different times.
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
