"""The machine on which ``launch`` runs: its name, cores, devices and programs, without torch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from wordrun.errors import UserError

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class LocalHost:
    """This machine, and how each fact was found."""

    name: str
    cores: int
    cores_why: str
    devices: int
    devices_why: str


def local_host(env: Mapping[str, str]) -> LocalHost:
    """Return what this machine shows to a process with ``env``."""
    return LocalHost(socket.gethostname(), *count_cores(), *count_devices(env))


def short(host: str) -> str:
    """Return a host's name without its domain."""
    return host.partition(".")[0]


def count_cores() -> tuple[int, str]:
    """Return how many cores this process may use, and how that was found."""
    try:
        return len(os.sched_getaffinity(0)), "the CPU affinity of this process"
    except AttributeError:  # macOS
        return os.cpu_count() or 1, "the cores of this machine"


def count_devices(env: Mapping[str, str], root: str = "/") -> tuple[int, str]:
    """Return how many accelerators a process with ``env`` would see, and how that was found.

    Args:
        env: its environment; a ``*_VISIBLE_DEVICES`` in it is believed.
        root: the directory of ``proc``, ``dev`` and ``sys``.
    """
    for name in DEVICE_VARIABLES:
        if name in env:
            visible = [word.strip() for word in env[name].split(",")]
            # CUDA stops at the first invalid name: empty, -1 or NoDevFiles hide all that follow.
            end = next((i for i, word in enumerate(visible) if word in ("", "-1", "NoDevFiles")), len(visible))
            return end, f"{name}={env[name]}"
    nvidia = len(_names(os.path.join(root, "proc/driver/nvidia/gpus")))
    if nvidia:
        nodes = [name for name in _names(os.path.join(root, "dev")) if name[:6] == "nvidia" and name[6:].isdigit()]
        # A container sees every GPU of the machine in /proc, but has device files only for its own.
        return (len(nodes), "/dev/nvidia*") if 0 < len(nodes) < nvidia else (nvidia, "/proc/driver/nvidia/gpus")
    topology = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    amd = sum(_gpu_id(os.path.join(topology, node, "gpu_id")) != 0 for node in _names(topology))
    if amd:
        return amd, "/sys/class/kfd"
    return 0, "none in /proc/driver/nvidia or /sys/class/kfd"


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _gpu_id(path: str) -> int:
    """Return the id in a node's ``gpu_id`` file; CPUs are nodes too, with id 0."""
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


class CommandError(UserError):
    """The command cannot be started."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def own_bin() -> str:
    """Return the directory of this environment's commands, such as ``launch`` and ``python``."""
    return os.path.join(sys.prefix, "bin")


def is_runnable(path: str) -> bool:
    """Say whether ``path`` is a file that this user may execute."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


def find_command(word: str, path: str) -> tuple[str, str]:
    """Return the file that ``word`` runs, and else a file of that name that is not executable (or two "").

    Args:
        word: first word of the command.
        path: the PATH in which it will be looked for.
    """
    folders = [""] if "/" in word else path.split(os.pathsep)
    files = [os.path.join(folder, word) for folder in folders]
    runnable = next((file for file in files if is_runnable(file)), "")
    plain = next((file for file in [word, *files] if os.path.isfile(file)), "")
    return runnable, plain


def check_command(word: str, path: str) -> None:
    """Raise a CommandError, with the exit status of a shell, where ``word`` cannot be run with this PATH."""
    runnable, plain = find_command(word, path)
    if runnable:
        return
    if not plain:
        directory = " (it is a directory)" if os.path.isdir(word) else ""
        where = "no such file" if "/" in word else "in no directory of PATH"
        raise CommandError(f"{word}: command not found{directory or f': {where}'}", 127)
    if plain.endswith(".py"):
        raise CommandError(f"{word} is not an executable file; did you mean: launch python {word}", 126)
    if "/" in word:
        raise CommandError(f"{word} is not executable: chmod +x {word}", 126)
    raise CommandError(f"{word}: command not found: in no directory of PATH (there is a file {plain}; chmod +x?)", 127)
