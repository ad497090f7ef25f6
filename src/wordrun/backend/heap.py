"""Memory that a training step frees stays with the process until the next step allocates it again."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**25
"""Bytes up to which blocks come from the heap, the most that glibc takes; larger ones are mapped one by one."""
SET_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed() -> bool:
    """Let glibc keep what is freed, and return whether it does.

    By default it returns the end of the heap to the system when a few MB there are free, as at the end of each backward
    pass, and the next step gets it back page by page, each filled with zeros. Other allocators, and those that the user
    has set up by environment variables, stay as they are.

    Not for backends that gather parameters: that leaves holes of many sizes, and FSDP's ranks took twice the memory.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in SET_BY_USERS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, -1))
