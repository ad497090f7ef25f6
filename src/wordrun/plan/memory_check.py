"""What a run needs, compared with the memory that its ranks have; on a CPU, before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from wordrun.common.errors import ConfigError
from wordrun.plan.memory_fit import Fit, Room, gib, table


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
