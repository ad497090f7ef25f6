"""What a step frees is there for the next step, without page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# 40 blocks of 1 MB, as activations; the second round reuses them if the first has not given them back.
SCRIPT = """
import ctypes, resource, sys
from wordrun.backend import base
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
kept = base.keep_freed() if "keep" in sys.argv else None
def step():
    blocks = [libc.malloc(2**20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 2**20)
    for block in blocks[::-1]:
        libc.free(block)
step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str, **env: str) -> list[str]:
    """Return whether memory is kept, and the page faults of a step."""
    command = [sys.executable, "-c", SCRIPT, *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_step_reuses_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MALLOC_"):
            monkeypatch.delenv(name)
    given_back, kept = faults(), faults("keep")
    assert given_back[0] == "None"
    assert kept[0] == "True"
    assert int(given_back[1]) > 40 * 100
    assert int(kept[1]) < 100
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="100000")[0] == "False"  # the user's own setting counts
