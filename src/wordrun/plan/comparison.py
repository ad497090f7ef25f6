"""What a run needs, compared with the memory that its ranks have; on a CPU, before torch is imported."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from importlib import metadata

from wordrun.common import cgroup
from wordrun.common.errors import ConfigError
from wordrun.common.files import read_proc
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.launch.job import count_devices
from wordrun.plan.budget import within_budget
from wordrun.plan.fit import Fit, Room, gib, table
from wordrun.plan.shapes import needs_torch, shapes_of


@dataclass(frozen=True)
class Comparison:
    """What a run needs, and what the ranks with least memory have."""

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

    def refuse(self) -> None:
        """Refuse the run if it cannot fit, unless train.check_memory is false.

        Raises:
            ConfigError: it cannot; the message says what takes the memory, and what would fit.
        """
        if self.fit.cfg.train.check_memory and not self.fit.may_fit(self.room):
            off = "train.check_memory=false starts it anyway."
            raise ConfigError(
                "\n".join([f"not enough memory: {self}", *self.advice(self.room), off]), page="plan.md#before-every-run"
            )

    def advice(self, room: Room) -> list[str]:
        """Return lines about what takes the memory, and what would fit into ``room``."""
        ranks, per_node = self.fit.layout.size, self.fit.per_node
        plan = f"wordrun plan plan.device={self.device} plan.devices={ranks} plan.per_node={per_node}"
        if self.room.device < 2**50:  # else it is unknown
            sharing = per_node if self.device == "cpu" else 1
            plan += f" plan.memory={self.room.device * sharing / 2**30:.1f}"
        return [
            "Estimated for each rank:",
            *table(self.fit.need),
            *self.fit.remedies(room),
            f"For all backends: {plan}, with this run's options.",
        ]


def refuse_before_torch(cfg: Config, world: World) -> None:
    """Refuse a run that cannot fit on this node's CPUs, as far as that is known before the seconds of importing torch.

    Raises:
        ConfigError: it cannot.
    """
    memory = cgroup.memory()
    if memory is None or needs_torch(cfg.model) or not _runs_on_cpu(cfg):
        return
    at = cfg.backend.layout(world.size, world.per_node)
    cfg = replace(cfg, train=replace(cfg.train, dtype=least_dtype(cfg.train.dtype)))
    model = shapes_of(cfg.model, cfg.tokenizer.known_vocab_size or 1)
    fit = within_budget(Fit(cfg, model, at, world.local_size, on_cpu=True))
    Comparison(fit, Room(memory / world.local_size), world.host).refuse()


def _runs_on_cpu(cfg: Config) -> bool:
    """Return whether the run certainly uses the CPU: False if only torch can tell."""
    if cfg.train.device != "auto":
        return cfg.train.device == "cpu"
    # torch's published builds for CUDA and ROCm; others may drive devices that have no file in /proc or /sys/class/kfd.
    known = re.fullmatch(r"[\d.]+(\+(cpu|cu\d+|rocm[\d.]+))?", metadata.version("torch"))
    return known is not None and count_devices(os.environ)[0] == 0


def least_dtype(asked: str) -> str:
    """Return the smallest dtype in which a CPU may compute a run that asks for ``asked``."""
    fast = re.search(r"\b(avx512_bf16|amx_tile)\b", read_proc("/proc/cpuinfo"))
    return "bf16" if asked in ("auto", "bf16") and fast else "fp32"
