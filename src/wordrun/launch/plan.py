"""What a launch will run, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher
from wordrun.launch.request import Decided


@dataclass(frozen=True)
class LaunchPlan:
    """All that is needed to start the ranks, and the reasons."""

    argv: tuple[str, ...]
    command: tuple[str, ...]
    env_set: Mapping[str, str]
    env_unset: tuple[str, ...]
    np: int
    ppn: int
    hosts: tuple[str, ...]
    launcher: Launcher
    job: Job
    decided: Decided
    reasons: Mapping[str, str]
    site: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that must exist before the launcher starts, with their contents."""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which ``argv`` is started from one that has ``env``."""
        kept = {name: value for name, value in env.items() if name not in self.env_unset}
        return {**kept, **self.env_set}
