"""Watch whether the ranks ever connect to each other (Linux).

If they do not, the command has run N times separately, which looks like a success of one run on N ranks.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from wordrun.common.files import read_proc
from wordrun.launch import processes
from wordrun.launch.plan import LaunchPlan

# Seconds between samples. Ranks of a short program may be connected only for a moment, so the first samples are close
# together, and closer still once a rank has loaded torch.
FIRST_S, TORCH_S, LATER_S, DENSE_S = 0.05, 0.01, 2.0, 30.0
LIBRARIES = re.compile(r"/((?:libtorch_python|libmpi\w*)\.so(?:\.\d+)?)")
# Reading the kernel's table of connections takes milliseconds. Once ranks have a library that may connect them, the
# table is read in the first CHANGING samples after their sockets have changed and then in every DUE-th sample, because
# a socket may connect late, or a rank may load another library.
CHANGING, DUE = 6, 10
# Reading /proc may block for a process that is stuck in the kernel.
PATIENCE_S = 2.0
# States of a connection in /proc/net/tcp.
TIME_WAIT, LISTENING = "06", "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
# A rank connects to these ports of other hosts for downloads and logging.
WEB = (80, 443, 3128, 8080)


@dataclass
class ConnectionWatch:
    """Samples the libraries and connections of the ranks on this host until two ranks are connected."""

    plan: LaunchPlan
    launcher: int
    """Process ID of the launcher."""
    met: bool = False
    libraries: set[str] = field(default_factory=set)
    """The torch and MPI libraries that ranks have loaded."""
    variables: set[str] = field(default_factory=set)
    """Prefixes of the variables by which MPI libraries find the other ranks."""
    pids: Callable[[], Mapping[int, int] | None] = field(default=lambda: None)
    """Returns the process IDs by rank; None: the ranks are those processes that have a RANK."""
    _ranks: dict[int, str] = field(default_factory=dict)
    """Ranks by process ID."""
    _of_launcher: set[tuple[str, str]] = field(default_factory=set)
    """Connections of the launcher's own processes."""
    _listened: bool = False
    """A rank has waited for connections, so it may have met others between two samples."""
    _samples: int = 0
    _due: int = 0
    """The sample that reads the libraries and the connections, at the latest."""
    _inodes: frozenset[str] = frozenset()
    """Sockets of the processes in the last sample."""
    _changed: int = 0
    """The sample that found other sockets than the one before it."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    def begin(self) -> None:
        """Watch, in a thread, until the ranks have met or ``end`` is called."""
        if sys.platform == "linux" and self.plan.ranks.np > 1:
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()

    def end(self) -> str:
        """Return what the user should know if all ranks have ended well; empty: nothing."""
        if self._watcher is None:
            return ""
        self._ended.set()
        self._watcher.join(PATIENCE_S)
        if self._watcher.is_alive():
            return ""
        mpi = {name for name in self.libraries if name.startswith("libmpi")}
        is_started = self._has_started(mpi)
        if self.met or not self.libraries or self._was_connected():
            return ""
        if (is_started and not self._uses_torch) or (self._listened and not mpi):
            return ""
        np, launcher = self.plan.ranks.np, self.plan.launcher.name
        said, times = f"the {np} ranks never connected to each other", f"ran {np} times, separately"
        if is_started:  # MPI's messages leave no trace, and some frameworks load MPI without using it
            said += f": unless COMMAND exchanges data by MPI itself, it {times}"
        else:
            said += f", so COMMAND {times}"
        if mpi and not is_started:
            said += f": each was rank 0 of 1 for its MPI library, which {launcher} does not start (launch --doctor)"
        if self._uses_torch:
            said += (
                ". To work together, they have to join a process group: init_process_group() in torch, cpu=True in "
                "Accelerate on CPUs, devices=N and num_nodes=N in Lightning"
            )
        return said

    def _watch(self) -> None:
        begun, pause = time.monotonic(), FIRST_S
        while not self.met and not self._ended.wait(pause):
            # CPU time: on a busy machine, waiting for a core is no reason to look less often.
            before = time.thread_time()
            self.sample()
            took = time.thread_time() - before
            first = TORCH_S if self._uses_torch else FIRST_S
            pause = max(
                first if time.monotonic() - begun < DENSE_S else LATER_S, took if self._is_changing else 4 * took
            )

    def sample(self) -> None:
        """Look at the ranks' libraries and connections."""
        owners: dict[str, str] = {}
        is_due = self._samples >= self._due
        if is_due:
            self._due = self._samples + DUE * (5 if self._uses_torch else 1)
        for pid, rank in self._processes():
            if rank and (is_due or not self.libraries):  # reading all maps takes milliseconds
                maps = read_proc(f"/proc/{pid}/maps")
                self.libraries |= {*LIBRARIES.findall(maps)}
            for inode in sockets(pid):
                # A rank inherits sockets of the launcher, whose processes come first.
                owners.setdefault(inode, rank)
        if owners.keys() != self._inodes:
            self._inodes, self._changed, self._due = frozenset(owners), self._samples, self._samples
        found = [
            (owners[inode], state, here, there)
            for state, here, there, inode in (connections() if self._is_changing or is_due else ())
            if inode in owners
        ]
        self._samples += 1
        self._listened |= any(rank and state == LISTENING for rank, state, _, _ in found)
        ends = {(here, there): rank for rank, state, here, there in found if state != LISTENING}
        self._of_launcher |= {ends_of for ends_of, rank in ends.items() if not rank}
        self.met |= any(rank and self._is_meeting(rank, *each, ends) for each, rank in ends.items())

    def _is_meeting(self, rank: str, here: str, there: str, ends: dict[tuple[str, str], str]) -> bool:
        """Return whether a connection of ``rank`` leads to another rank, or may do so."""
        other = ends.get((there, here))
        if other:
            return other != rank
        if self._port in (_port(here), _port(there)):
            return True  # torchrun's own store, or a rank on another host
        return len(self.plan.hosts) > 1 and not there.startswith(LOOPBACK) and _port(there) not in WEB

    def _was_connected(self) -> bool:
        """Return whether ranks met between two samples or after the last: closed ones are listed for a minute."""
        return any(
            state == TIME_WAIT
            and self._port in (_port(here), _port(there))
            and not {(here, there), (there, here)} & self._of_launcher
            for state, here, there, _ in connections()
        )

    def _has_started(self, mpi: set[str]) -> bool:
        """Return whether the launcher may have started these libraries: its variables are those that they read."""
        if not mpi:
            return False
        is_open = all(name.endswith((".so.20", ".so.40")) for name in mpi)  # Open MPI
        return "PMIX_" in self.variables or ("PMI_" in self.variables and not is_open)

    @property
    def _is_changing(self) -> bool:
        return bool(self.libraries) and self._samples - self._changed < CHANGING

    @property
    def _uses_torch(self) -> bool:
        return any(name.startswith("libtorch") for name in self.libraries)

    @property
    def _port(self) -> int:
        return int(self.plan.env["MASTER_PORT"])

    def _processes(self) -> Iterator[tuple[int, str]]:
        """Yield this launch's processes on this host and their ranks, the launcher's own first."""
        # In a job, daemons may start the ranks (srun, PALS).
        found = processes.of_launch(self.launcher, self.plan.decided.launch_id, is_step=not self.plan.job.is_local)
        known = self.pids()
        if known is not None:
            self._ranks = {pid: str(rank) for rank, pid in known.items()}
        for pid in found - {*self._ranks} if known is None else ():
            words = read_proc(f"/proc/{pid}/environ").split("\0")
            # rank_env.sh exports RANK to its command; its own shell does not have it.
            rank = next((word[5:] for word in words if word.startswith("RANK=")), "")
            if rank:
                self._ranks[pid] = rank
                self.variables |= {name for name in ("PMI_", "PMIX_") if any(word.startswith(name) for word in words)}
        yield from ((pid, "") for pid in found - {*self._ranks})
        yield from ((pid, self._ranks[pid]) for pid in found & {*self._ranks})


def sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        return  # it has ended


def connections() -> Iterator[tuple[str, str, str, str]]:
    """Yield the state, both ends (hexadecimal) and the inode of each TCP socket of this host."""
    for name in ("tcp", "tcp6"):
        for line in read_proc(f"/proc/net/{name}").splitlines()[1:]:
            _, here, there, state, _, _, _, _, _, inode, *_ = line.split()
            yield state, here, there, inode


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)
