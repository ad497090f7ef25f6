"""Plans before anything is built whether the run fits into memory, and explains an out-of-memory error."""

from __future__ import annotations

import re

import torch

from wordrun.common import cgroup
from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.dist.collectives import all_min
from wordrun.dist.mesh import Layout
from wordrun.plan.memory_fit import TOLERANCE, Comparison, Fit, Room, gib, readable, within_budget
from wordrun.plan.parameter_shapes import ModelShapes
from wordrun.train.metrics import device_name

UNLIMITED = 2**60
"""Bytes to assume where the operating system does not say how much memory is available (macOS)."""
NODE_BITS = 20
"""Bits of a node's index. Memory [MiB] and index are compared as one integer, whose last bits are the index."""
SIGNS = re.compile(r"out of memory|out_of_(host|device)_memory|alloc_failed|can't allocate memory", re.IGNORECASE)
"""What libraries report when memory runs out; only torch's allocators for accelerators raise a specific exception."""


class MemoryPlan:
    """The estimate of ``wordrun plan`` for this run, and the memory of the rank that has the least.

    Every rank must create one, before any of them allocates its share: the ranks agree on the least memory, so that all
    take the same decisions.

    Args:
        cfg: the config, with the dtype in which the run computes.
        world: the ranks.
        layout: which ranks share what.
        shapes: those of the model; None: there is no estimate, so nothing is checked.

    Raises:
        ConfigError: the run does not fit.
    """

    def __init__(self, cfg: Config, world: World, layout: Layout, shapes: ModelShapes | None) -> None:
        self.device, self.world, self.shapes = torch.device(world.device), world, shapes
        host = (cgroup.memory() or UNLIMITED) / world.local_size
        own = host if self.device.type == "cpu" else _free(self.device, world)
        keys = [int(size / 2**20) << NODE_BITS | world.node for size in (own, host)]
        least = all_min(torch.tensor(keys, device=self.device)).tolist()
        self.room = Room(*(float((key >> NODE_BITS) * 2**20) for key in least))
        self.node = least[0] % 2**NODE_BITS
        self.fit: Fit | None = None
        """What the run needs; None: there is no estimate."""
        if shapes is not None:
            self.fit = within_budget(Fit(cfg, shapes, layout, world.local_size, self.device.type == "cpu"))
            self._compared(self.fit).check()
            self._report(self.fit, cfg.train.memory_budget_gb)
        elif cfg.train.memory_budget_gb is not None:
            raise ConfigError(
                f"train.memory_budget_gb={cfg.train.memory_budget_gb:g} needs an estimate of the memory, but "
                f"there is none for model={cfg.model.name}: set train.activation_checkpointing instead"
            )

    def _report(self, fit: Fit, budget: float | None) -> None:
        chosen = fit.cfg.train.activation_checkpointing
        if budget is not None:
            text = "train.memory_budget_gb=%g: train.activation_checkpointing=%s, and each rank needs about %.4g GB"
            LOGGER.info(text, budget, chosen, fit.need.total / 1e9, extra=FIRST_RANK)
        if not fit.fits(self.room):
            off = f"estimates are up to {TOLERANCE - 1:.0%} off"
            LOGGER.warning("memory may run out: %s (%s)", self._compared(fit), off, extra=FIRST_RANK)

    def shortage(self, error: Exception) -> UserError | None:
        """Return a message that says what uses the memory if ``error`` is that there is too little; else None."""
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and SIGNS.search(str(error))):
            return UserError("\n".join(self._explanation(error)), page="plan.md#before-every-run", cause=error)
        return None

    def _compared(self, fit: Fit) -> Comparison:
        world, node = self.world, self.node
        host = world.host if node == world.node else dict(enumerate(world.hosts)).get(node, f"node {node}")
        kind = self.device.type
        return Comparison(fit, self.room, host, kind, "" if kind == "cpu" else device_name(self.device))

    def _explanation(self, error: Exception) -> list[str]:
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        what = f"cannot allocate {readable(int(asked[1]))}" if asked else first_line(error)
        where = f"{self.device} on {self.world.host}" if self.device.type != "cpu" else self.world.host
        lines = [f"out of memory on {where}: {what}"]
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            used, reserved = module.max_memory_allocated(self.device), module.memory_reserved(self.device)
            lines.append(f"torch's allocator used {gib(used)} at its peak and has reserved {gib(reserved)}.")
        if self.fit is None:
            return [*lines, "A smaller model.batch_size with a larger train.accumulation needs less."]
        # The estimate was too low, or others use the memory too.
        room = Room(min(self.room.device, 0.9 * self.fit.need.total), self.room.host)
        return [*lines, *Comparison(self.fit, self.room, self.world.host, self.device.type).advice(room)]


def _free(device: torch.device, world: World) -> float:
    """Return the bytes that this rank may allocate on ``device``."""
    module = torch.get_device_module(device)
    try:
        free = module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)
    except (AttributeError, RuntimeError):  # an older torch or driver for XPU
        free = module.get_device_properties(device).total_memory
    count = module.device_count()
    return float(free) / (-(-world.local_size // count) if count > 1 else 1)
