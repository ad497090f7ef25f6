"""Reads a Python environment's files in order, so that imports find them in the node's page cache.

    python -I prewarm.py FOLDER

also copies the compiled modules to ``FOLDER``, on a disk of the node, for ``PYTHONPYCACHEPREFIX``. ``launch --prewarm``
runs this file once on each node. It needs the standard library only, because the Python that the command runs under
need not have wordrun.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

CHUNK = 2**22
READERS = 8
"""Files read at a time: a parallel file system answers several requests at once."""


def files(folders: Iterable[str]) -> list[str]:
    """Return what importing reads below ``folders``: shared libraries, the largest first, then compiled modules."""
    libraries, modules = [], []
    for folder in folders:
        for where, inside, names in os.walk(folder):
            # The standard library's folder contains another environment's packages, or they are in ``folders``.
            inside[:] = [name for name in inside if name not in ("site-packages", "dist-packages")]
            for name in sorted(names):
                path = os.path.join(where, name)
                if name.endswith(".so") or ".so." in name:
                    libraries.append((os.path.getsize(path) if os.path.exists(path) else 0, path))
                elif name.endswith(f".{sys.implementation.cache_tag}.pyc"):
                    modules.append(path)
    return [path for _, path in sorted(libraries, reverse=True)] + modules


def read(path: str, cache: str = "") -> int:
    """Read the file ``path`` and return its size; one that cannot be read is left out.

    With ``cache``, a compiled module is copied to where Python looks for it if that is its PYTHONPYCACHEPREFIX.
    """
    size, buffer = 0, bytearray(CHUNK)
    try:
        if cache and path.endswith(".pyc"):
            folder, name = os.path.split(path)
            return _copy(path, os.path.join(f"{cache}{os.path.dirname(folder)}", name))
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    except OSError:
        pass
    return size


def _copy(path: str, to: str) -> int:
    """Copy the file ``path`` at once, unless ``to`` is as new, and return its size."""
    size, old = os.path.getsize(path), os.path.exists(to) and os.stat(to)
    if not old or old.st_size != size or old.st_mtime < os.path.getmtime(path):
        os.makedirs(os.path.dirname(to), exist_ok=True)
        part = f"{to}.{os.getpid()}"  # a rank of another launch may import it meanwhile
        shutil.copyfile(path, part)
        os.replace(part, to)
    return size


def use_cache(folder: str) -> None:
    """Create ``folder`` for compiled modules, unless it exists; nobody else may write to it.

    Raises:
        OSError: it cannot be created, or somebody else could have put code into it.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")


def main() -> int:
    """Read the environment of this Python, and print one line about it."""
    start = time.monotonic()
    cache = sys.argv[1] if len(sys.argv) > 1 else ""
    if cache:
        try:
            use_cache(cache)
        except OSError as error:
            print(f"prewarm: {socket.gethostname()}: {error}", file=sys.stderr)
            return 1
    paths = sysconfig.get_paths()
    folders = {os.path.realpath(paths[name]): paths[name] for name in ("platlib", "purelib", "stdlib")}
    found = files(folders.values())
    with ThreadPoolExecutor(READERS) as pool:
        sizes = list(pool.map(partial(read, cache=cache), found))
    seconds = time.monotonic() - start
    kept = f", and keeps compiled modules in {cache}" if cache else ""
    print(
        f"prewarm: {socket.gethostname()} read {sum(sizes) / 1e9:.2f} GB in {len(sizes):,} files below "
        f"{', '.join(folders)} in {seconds:.1f} s{kept}", flush=True,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
