"""Find out whether the kernel has killed a rank because memory ran out (out of memory, OOM).

Only the kernel's own records tell: the rank just gets SIGKILL.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re

from wordrun.common import cgroup, slurm
from wordrun.common.files import read_proc

KILLED = re.compile(r"Killed process (\d+) \((.*)\) total-vm:\d+kB, anon-rss:(\d+)kB(?:.*UID:(\d+))?")
# The kernel log has the process IDs of the first PID namespace, which has this fixed number.
FIRST_NAMESPACE = "pid:[4026531836]"


class OomWatch:
    """Compares the kernel's counts of processes killed for memory on this host with those at its creation.

    It reads the counts of this process's control group and, in SLURM, of all groups of the job. Without such counts
    (another system than Linux, or an old kernel), nothing is known.
    """

    def __init__(self, root: str = "/") -> None:
        """Read the counts. Call this before the ranks start; ``root`` contains ``proc``, ``sys`` and ``dev``."""
        self._root = root
        self._before = _counts(root)

    def killed_for_memory(self, pid: int | None = None) -> str | None:
        """Return a sentence with the evidence that the kernel killed a process of this job for memory, or None.

        Args:
            pid: the process; None: any process of this job.
        """
        rose = [path for path, count in _counts(self._root).items() if count > self._before.get(path, 0)]
        if not rose:
            return None
        kills = _kernel_log(self._root)
        if pid is not None and kills and os.readlink("/proc/self/ns/pid") == FIRST_NAMESPACE:
            kills = [kill for kill in kills if kill[0] == pid]
            if not kills:
                return None  # it was another process of this job
        detail = "a process of this job"
        if kills:
            number, name, size = kills[-1]
            detail = f"{name} (process {number}, {size / 2**30:.1f} GiB)"
        return f"the kernel killed {detail} because memory ran out (oom_kill in {rose[0]})"


def _counts(root: str) -> dict[str, int]:
    """Return the number of processes killed so far, by the file that says so."""
    paths = cgroup.files("memory", "memory.events", "memory.oom_control", root)[:1]
    # srun's ranks are in other groups of the job than this process; version 1 does not add up the groups below.
    if paths and (job := slurm.group_of_job(paths[0])):
        paths = glob.glob(os.path.join(glob.escape(job[0]), "**", job[1]), recursive=True)
    counts = {path: re.search(r"^oom_kill (\d+)$", read_proc(path), re.MULTILINE) for path in paths}
    return {path: int(count[1]) for path, count in counts.items() if count}


def _kernel_log(root: str) -> list[tuple[int, str, int]]:
    """Return this user's processes that the kernel log says were killed for memory: ID, name, bytes."""
    found = []
    with contextlib.suppress(OSError):  # often readable by root alone
        log = os.open(os.path.join(root, "dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
        try:
            while record := _next_record(log):
                for pid, name, kilobytes, user in KILLED.findall(record):
                    if user in ("", str(os.getuid())):
                        found.append((int(pid), name, 1024 * int(kilobytes)))
        finally:
            os.close(log)
    return found


def _next_record(log: int) -> str:
    """Return the next record of the kernel log; empty at its end."""
    while True:
        try:
            return os.read(log, 8192).decode(errors="replace")
        except BrokenPipeError:  # the record was overwritten before it was read
            continue
        except BlockingIOError:
            return ""
