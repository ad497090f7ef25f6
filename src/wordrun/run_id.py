"""Run IDs."""

import os
import time


def new_run_id() -> str:
    """Return a unique name for a run: the time, and four random hex digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
