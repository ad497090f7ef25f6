"""How the ranks are started: by the launcher or, with an option such as --elastic, by a process on each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, ClassVar

from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher
from wordrun.launch.options import Options
from wordrun.launch.request import Ranks, Request

STARTERS: Mapping[str, str] = {"elastic": "wordrun.launch.elastic.starter:GuardianStarter"}
"""Subclasses of ``RankStarter`` as MODULE:NAME, by the option that chooses them (a field of ``Options``)."""


class RankStarter:
    """The launcher starts the ranks. Subclasses let it start something else, which starts the ranks in turn."""

    control: ClassVar[str] = "wordrun.launch.rank_control:RankControl"
    """The class, as MODULE:NAME, through which launch reaches the ranks once they run."""
    keeps_spare_nodes: ClassVar[bool] = False
    """Whether the nodes of --spare-nodes are part of this launch, and not only of a relaunch."""
    uses_rank_env: ClassVar[bool] = True
    """Whether ``rank_env.sh`` starts each rank."""
    noise: ClassVar[str] = ""
    """Regular expression for whole lines of output that do not explain a failure, as ``Launcher.noise``."""

    def check(self, options: Options) -> None:
        """Check the options.

        Raises:
            ConfigError: they contradict this way of starting ranks; the message has the remedy.
        """

    def processes(self, options: Options, job: Job, ranks: Ranks) -> int:
        """Return how many processes the launcher has to start."""
        return ranks.np

    def launcher(self, found: Launcher) -> Launcher:
        """Return the launcher to use instead of the one that was ``found`` for that many processes."""
        return found

    def request(self, request: Request, launcher: Launcher) -> Request:
        """Return what the launcher has to start, so that the ranks of ``request`` are started."""
        return request

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that the launcher passes on; ``env`` are those that launch sets for ranks."""
        return dict(env)

    def described(self, ranks: Ranks, launcher: str) -> str:
        """Return what starts ``ranks``, in words for a message; ``launcher`` names the launcher."""
        return launcher

    def note(self, command: str) -> str:
        """Return a line for --dry-run on what starts ``command``, if the launcher's command line does not show it."""
        return ""


def starter_of(options: Options) -> RankStarter:
    """Return the way of starting ranks that ``options`` choose."""
    target = next((target for name, target in STARTERS.items() if getattr(options, name)), "")
    found: RankStarter = resolve_name(target)() if target else RankStarter()
    return found


def by_launcher(options: Options) -> Options:
    """Return ``options`` with which the launcher itself starts the ranks."""
    others: dict[str, Any] = dict.fromkeys(STARTERS, False)
    return replace(options, **others)
