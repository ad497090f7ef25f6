"""How launch reaches the running ranks: it signals them, finds their processes, and learns how they end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from wordrun.launch import processes
from wordrun.launch.messages import say
from wordrun.launch.output import Output
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.record import Record
from wordrun.launch.retries import Outcome, Retries

StartLauncher = Callable[[LaunchPlan, Mapping[str, str]], subprocess.Popen[bytes]]
"""Starts a launcher for a plan, with additional variables; its output passes through launch."""


@dataclass
class RankControl:
    """Controls ranks that the launcher has started. Subclasses control those of another ``RankStarter``."""

    plan: LaunchPlan
    retries: Retries
    """How often ranks may be restarted."""
    output: Output
    status_dir: str
    """The folder of the ranks' reports on how they end; empty: there is none."""
    record: Record | None = None
    """launch.json; None: it could not be written."""
    say: Callable[[str], None] = say
    """Prints a message."""

    memory: str = ""
    """The evidence that memory ran out on another node."""
    succeeded: bool = False
    """Whether all ranks have succeeded, whatever the launcher's exit status."""

    def variables(self) -> dict[str, str]:
        """Return further variables for the launcher."""
        return {}

    def begin(self, start: StartLauncher) -> None:
        """Supervise the ranks from now on; ``start`` starts further launchers."""

    def pids(self) -> Mapping[int, int] | None:
        """Return the process IDs of the ranks by rank; None: the ranks are those processes that have a RANK."""
        return None

    def ranks_here(self, launcher: int) -> list[int]:
        """Return the process IDs of the ranks on this host, of Python programs; ``launcher`` is the launcher's."""
        return processes.pythons(launcher, self.plan.decided.launch_id, self.plan.launcher.own_module)

    def send(self, number: int, launcher: int) -> None:
        """Send a signal to every rank, once; ``launcher`` is the launcher's process ID.

        Raises:
            OSError: it could not be sent.
            SubprocessError: the scheduler's command failed.
        """
        self.plan.launcher.send(number, launcher, self.plan.job, self.plan.decided.step)

    def look(self) -> None:
        """Act on deadlines that have passed; called several times a second."""

    def ended(self, pids: Collection[int]) -> None:
        """Note that these child processes of launch have ended."""

    def next_launcher(self) -> subprocess.Popen[bytes] | None:
        """Return the launcher that stands in for the first one, which has ended; None: there is none."""
        return None

    @property
    def launcher_is_late(self) -> bool:
        """Whether the launcher waits for a lost host, although all ranks have ended well."""
        return False

    @property
    def has_launchers(self) -> bool:
        """Whether launchers other than the first one run."""
        return False

    @property
    def knows_ends(self) -> bool:
        """Whether it is known how all ranks have ended, so that no report is missing."""
        return False

    def stop(self) -> None:
        """Restart no ranks from now on: the launch is being stopped."""

    def kill(self) -> None:
        """Kill those ranks that do not die with the launcher."""

    def finish(self) -> None:
        """Release all resources: the launcher has ended."""

    def outcome(self, outcome: Outcome, *, reported: bool) -> Outcome:
        """Return ``outcome`` with what else is known; ``reported`` says whether a rank has reported a failure."""
        return outcome
