"""Names of runs."""

from __future__ import annotations

import os
import time


def new_run_id() -> str:
    """Return a name that no other run has: the time, and four random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
