"""What a launch will run, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wordrun.launch.launchers.base import Launcher
from wordrun.launch.request import Request


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(Request):
    """A request, and the command line and environment that fulfil it."""

    launcher: Launcher
    argv: tuple[str, ...]
    env_unset: tuple[str, ...]
    """Variables that are removed before ``env`` is set."""
    reasons: Mapping[str, str]
    files: Mapping[str, str]
    """Files that must exist before the launcher starts, with their contents."""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which ``argv`` is started from one that has ``env``."""
        kept = {name: value for name, value in env.items() if name not in self.env_unset}
        return {**kept, **self.env}
