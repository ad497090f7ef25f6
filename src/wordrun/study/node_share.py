"""``python -m wordrun.study.node_share K/M COMMAND...``: run a rank's command on share K of M of its cores and devices.

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


def portion(things: Sequence[str], share: int, shares: int) -> Sequence[str]:
    """Return share number ``share`` of ``shares`` equal ones; everything if there are fewer things than shares."""
    each = len(things) // shares
    return things[share * each : (share + 1) * each] if each else things


def devices(env: Mapping[str, str], count: int, share: int, shares: int) -> dict[str, str]:
    """Return the variables that choose a share of the ``count`` devices that a process with ``env`` would see."""
    listed = next((env[name] for name in (*DEVICES, "HIP_VISIBLE_DEVICES") if env.get(name)), "")
    names = listed.split(",")[:count] if listed else [str(number) for number in range(count)]
    return dict.fromkeys(DEVICES, ",".join(portion(names, share, shares))) if count else {}


def main() -> None:
    """Restrict this process to its share of cores and devices, and exec the command."""
    share, shares = map(int, sys.argv[1].split("/"))
    if hasattr(os, "sched_setaffinity"):
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        os.sched_setaffinity(0, map(int, portion(cores, share, shares)))
    env = {**os.environ, **devices(os.environ, count_devices(os.environ)[0], share, shares)}
    os.execvpe(sys.argv[2], sys.argv[2:], env)


if __name__ == "__main__":
    main()
