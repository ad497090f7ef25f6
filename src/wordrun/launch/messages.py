"""Messages of launch itself on stderr."""

from __future__ import annotations

import os
import sys

from wordrun.common.errors import short_lines


def say(message: str, page: str = "") -> None:
    """Print a message from launch, and the section of docs/ with more to say, on stderr if anybody reads it."""
    if message and page:
        message = f"{message}\nmore: docs/{page}"
    try:
        for line in short_lines(message):
            print(f"launch: {line}", file=sys.stderr, flush=True)
    except OSError:  # the job's exit status matters more
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
