"""Specifications of known devices: peak FLOP/s, memory, devices per node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """An accelerator model or a CPU."""

    model: str
    """Substring of the name reported by the driver."""
    peak_half: float | None
    """Dense peak FLOP/s in half precision with fp32 accumulation; None: unknown."""
    peak_fp32: float | None
    """Dense peak FLOP/s in fp32 without TF32; None: unknown."""
    per_node: int = 1
    """Devices in a typical node."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Maps each variant's name in ``plan.device`` to the GiB that a process finds on an idle device."""
    bf16: bool = True
    """Whether it has fast bf16, so that train.dtype=auto chooses it."""
    float8: bool = False
    """Whether train.float8 works on it."""


# FLOP/s are from the vendors' data sheets. Memory is as shown by the vendors' tools with error correction on, which is
# less than the data sheets' round figures. `find` takes the first match, so longer names precede their substrings.
DEVICES = (
    Device("B200", 2250e12, 75e12, 8, {"b200": 178.3}, float8=True),
    Device("GH200", 989e12, 67e12, 4, {"gh200": 94.5}, float8=True),
    Device("H200", 989e12, 67e12, 8, {"h200-141": 139.8}, float8=True),
    Device("H100 PCIe", 756e12, 51e12, float8=True),
    Device("H100 NVL", 835e12, 60e12, float8=True),
    Device("H100", 989e12, 67e12, 8, {"h100-80": 79.2}, float8=True),
    Device("A100", 312e12, 19.5e12, 4, {"a100-40": 39.5, "a100-80": 79.2}),
    Device("A40", 149.7e12, 37.4e12, 4, {"a40": 44.4}),
    Device("A30", 165e12, 10.3e12, 4, {"a30": 23.6}),
    Device("A10", 125e12, 31.2e12),
    Device("L40S", 362e12, 91.6e12, 4, {"l40s": 44.5}, float8=True),
    Device("L40", 181e12, 90.5e12, float8=True),
    Device("L4", 121e12, 30.3e12, 1, {"l4": 22.2}, float8=True),
    Device("V100", 125e12, 15.7e12, 4, {"v100-16": 15.8, "v100-32": 31.7}, bf16=False),
    Device("T4", 65e12, 8.1e12, 1, {"t4": 14.6}, bf16=False),
    Device("MI300X", 1307e12, 163.4e12, 8, {"mi300x": 191.7}),
    # One of its two dies; each is one device.
    Device("MI250X", 191.5e12, 23.9e12, 8, {"mi250x": 64.0}),
    # One of its two tiles; each is one device under ZE_FLAT_DEVICE_HIERARCHY=FLAT.
    Device("Max 1550", 419e12, 22.9e12, 12, {"max1550": 64.0}),
    Device("cpu", None, None, 1, {"cpu": 16.0}, bf16=False),
)

VARIANTS = {name: (device, gib) for device in DEVICES for name, gib in device.memory.items()}
"""Maps each valid ``plan.device`` to the device and its memory in GiB."""


def find(name: str) -> Device | None:
    """Return the device whose driver reports ``name``, such as "NVIDIA A100-SXM4-40GB"; None if it is unknown."""
    # The word boundary keeps A100 from matching A1000.
    return next((device for device in DEVICES if re.search(rf"{re.escape(device.model)}\b", name)), None)
