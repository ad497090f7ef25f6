"""The files of the control groups (Linux) that this process belongs to, in version 1 and 2 of their file system."""

from __future__ import annotations

import os


def files(controller: str, v2: str, v1: str, root: str = "/") -> list[str]:
    """Return the paths of a file in this process's control group and the groups above it, the nearest first.

    Args:
        controller: name of the controller, such as ``memory``.
        v2: name of the file in version 2.
        v1: its counterpart in version 1.
        root: the directory that contains ``proc`` and ``sys``.
    """
    found = []
    for line in read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            base, name = f"sys/fs/cgroup/{controller}", v1
        elif not controllers:
            base, name = "sys/fs/cgroup", v2
        else:
            continue
        # In a container, the file system may begin below the group that /proc names.
        parts = [part for part in group.split("/") if part]
        above = ("/".join(parts[:count]) for count in range(len(parts), -1, -1))
        found += [path for each in above if os.path.exists(path := os.path.join(root, base, each, name))]
    return found


def read(path: str) -> str:
    """Return the content of a file of the kernel; empty if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
