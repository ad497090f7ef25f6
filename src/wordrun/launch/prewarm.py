"""Reads a Python environment's files in order, so that imports find them in the node's page cache.

``launch --prewarm`` runs this file once on each node. It needs the standard library only, because the Python that the
command runs under need not have wordrun.
"""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

CHUNK = 2**22
READERS = 8
"""Files read at a time: a parallel file system answers several requests at once."""


def files(folders: Iterable[str]) -> list[str]:
    """Return what importing reads below ``folders``: shared libraries, the largest first, then compiled modules."""
    libraries, modules = [], []
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in sorted(names):
                path = os.path.join(where, name)
                if name.endswith(".so") or ".so." in name:
                    libraries.append((os.path.getsize(path) if os.path.exists(path) else 0, path))
                elif name.endswith(f".{sys.implementation.cache_tag}.pyc"):
                    modules.append(path)
    return [path for _, path in sorted(libraries, reverse=True)] + modules


def read(path: str) -> int:
    """Read the file ``path`` and return its size; one that cannot be read is left out."""
    size, buffer = 0, bytearray(CHUNK)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    except OSError:
        pass
    return size


def main() -> int:
    """Read the environment of this Python, and print one line about it."""
    start = time.monotonic()
    paths = sysconfig.get_paths()
    folders = dict.fromkeys(os.path.realpath(paths[name]) for name in ("platlib", "purelib", "stdlib"))
    with ThreadPoolExecutor(READERS) as pool:
        sizes = list(pool.map(read, dict.fromkeys(files(folders))))  # site-packages may be inside the standard library
    seconds = time.monotonic() - start
    print(
        f"prewarm: {socket.gethostname()} read {sum(sizes) / 1e9:.2f} GB in {len(sizes):,} files below "
        f"{', '.join(folders)} in {seconds:.1f} s", flush=True,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
