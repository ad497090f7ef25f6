"""Whether a run is running, has ended, died, or is silent."""

from __future__ import annotations

import socket
import time

from wordrun.common.run_dir import DIED, in_use
from wordrun.track.run_json import RunRecord

NO_REASON = ("", "running", DIED)
"""``exit_reason`` in run.json of a run that could not record why it ended."""
QUIET_S = 600
"""A run on another machine that has written nothing for this time [s] is silent."""


def state_of(run: RunRecord) -> str:
    """Return the state of a run: running, finished, stopped, failed, died, silent, or unknown.

    - died: ``launch`` recorded that none of its processes is left and that none said why it ended; or run.json still
      says "running", but the run was on this machine alone, and no process holds its directory.
    - silent: run.json says "running", the run is on other machines, and it has written nothing for ``QUIET_S``.
    - unknown: run.json is missing or cannot be read, and no process on this machine holds the directory.
    """
    reason = str(run.facts.get("exit_reason", ""))
    if reason in ("finished", DIED):
        return reason
    if reason not in ("running", ""):
        return "stopped" if reason.startswith("stopped") else "failed"
    if in_use(run.path):
        return "running"
    if not reason:
        return "unknown"
    if run.hosts == [socket.gethostname()]:
        return DIED
    return "silent" if time.time() - run.written > QUIET_S else "running"
