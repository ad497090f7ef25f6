"""The cores and the memory that this process may use, by its control groups (Linux, versions 1 and 2)."""

from __future__ import annotations

import math
import os
import re

from wordrun.common.files import read_proc


def files(controller: str, v2: str, v1: str, root: str = "/") -> list[str]:
    """Return the paths of a file in this process's control group and the groups above it, the nearest first.

    Args:
        controller: name of the controller, such as ``memory``.
        v2: name of the file in version 2.
        v1: its counterpart in version 1.
        root: the directory that contains ``proc`` and ``sys``.
    """
    found = []
    for line in read_proc(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            base, name = f"sys/fs/cgroup/{controller}", v1
        elif not controllers:
            base, name = "sys/fs/cgroup", v2
        else:
            continue
        # In a container, the file system may begin below the group that /proc names.
        names = [name for name in group.split("/") if name]
        above = ("/".join(names[:count]) for count in range(len(names), -1, -1))
        found += [path for each in above if os.path.exists(path := os.path.join(root, base, each, name))]
    return found


def own_cores() -> int:
    """Return how many cores this process may run on, by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores(root: str = "/") -> int | None:
    """Return how many cores the control groups let this process use at once, at least 1; None: no limit."""
    allowed = []
    for path in files("cpu", "cpu.max", "cpu.cfs_quota_us", root):
        period = "" if path.endswith("max") else read_proc(path.replace("quota", "period"))
        quota, each = (*read_proc(path).split(), *period.split(), "", "")[:2]
        if quota.isdigit() and each.isdigit():  # otherwise "max" or -1
            allowed.append(max(1, math.ceil(int(quota) / int(each))))
    return min(allowed, default=None)


def memory(root: str = "/") -> int | None:
    """Return the bytes of memory that this process and its children can still use; None: unknown."""
    free = re.search(r"^MemAvailable: +(\d+) kB$", read_proc(os.path.join(root, "proc/meminfo")), re.MULTILINE)
    left = [1024 * int(free[1])] if free else []
    for path in files("memory", "memory.max", "memory.limit_in_bytes", root):
        group, name = os.path.split(path)
        limit = read_proc(path).strip()
        used = read_proc(
            os.path.join(group, "memory.current" if name == "memory.max" else "memory.usage_in_bytes")
        ).strip()
        if limit.isdigit() and used.isdigit():
            # Cached files count as free: the kernel reclaims them, including those read more than once (active).
            statistics = dict(
                re.findall(r"^(?:total_)?(\w+_file) (\d+)$", read_proc(f"{group}/memory.stat"), re.MULTILINE)
            )
            cached = sum(int(statistics.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
            left.append(max(0, int(limit) - int(used) + cached))
    return min(left, default=None)
