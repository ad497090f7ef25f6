"""Whether a command starts wordrun, and with which arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

PYTHON = r"python[\d.]*t?"
"""Matches the names of Python's interpreters."""


def arguments_of_wordrun(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return what follows wordrun in ``command``, which starts it as ``wordrun`` or ``python -m wordrun``; None: it
    starts another program. ``python -m wordrun.NAME`` is ``wordrun NAME``.
    """
    program, *rest = command or ("",)
    if os.path.basename(program) == "wordrun":
        return tuple(rest)
    if not re.fullmatch(PYTHON, os.path.basename(program)):
        return None
    words = iter(rest)
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, "")
            continue
        # Several of Python's flags in one word, or one with a value.
        flags = re.fullmatch(r"-(?P<others>[^-cmWX]*)((?P<last>[cmWX])(?P<value>.*))?", word)
        if not flags or word == "-":  # a script, or a program on the standard input
            return None
        value = flags["value"] or (next(words, "") if flags["last"] else "")
        if flags["last"] == "c":
            return None
        if flags["last"] == "m":
            package, _, name = value.partition(".")
            return (*filter(None, [name]), *words) if package == "wordrun" else None
    return None
