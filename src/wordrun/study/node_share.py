"""``python -m wordrun.study.node_share K/M COMMAND...``: run a rank's command on part K of M of its cores and devices.

Points that share nodes are launched in this way, so that they do not share cores or devices. It works under
every launcher, since it divides what the launcher has given to the rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from wordrun.launch.job import count_devices

# ROCm reads the first one, too; the second is for Intel's GPUs.
DEVICES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def portion(things: Sequence[str], part: int, parts: int) -> Sequence[str]:
    """Return part ``part`` of ``parts`` equal ones; everything if there are fewer things than parts."""
    each = len(things) // parts
    return things[part * each : (part + 1) * each] if each else things


def devices(env: Mapping[str, str], count: int, part: int, parts: int) -> dict[str, str]:
    """Return the variables that choose a part of the ``count`` devices that a process with ``env`` would see."""
    listed = next((env[name] for name in (*DEVICES, "HIP_VISIBLE_DEVICES") if env.get(name)), "")
    names = listed.split(",")[:count] if listed else [str(number) for number in range(count)]
    return dict.fromkeys(DEVICES, ",".join(portion(names, part, parts))) if count else {}


def main() -> None:
    """Take the part, and become the command."""
    part, parts = map(int, sys.argv[1].split("/"))
    if hasattr(os, "sched_setaffinity"):
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        os.sched_setaffinity(0, map(int, portion(cores, part, parts)))
    env = {**os.environ, **devices(os.environ, count_devices(os.environ)[0], part, parts)}
    os.execvpe(sys.argv[2], sys.argv[2:], env)


if __name__ == "__main__":
    main()
