"""Do something before an exception that C++ code throws, and nobody catches, aborts this process.

gloo throws one in a thread of its own if ranks disagree about a size.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

LIBRARY = "/usr/lib/libc++abi.dylib" if sys.platform == "darwin" else "libstdc++.so.6"
SET_TERMINATE = "_ZSt13set_terminatePFvvE"
"""std::set_terminate. Its handler is an ordinary function, which may run Python and wait, unlike a signal's."""

_kept: list[Any] = []
"""The handler, which has to exist as long as the process."""


def before_abort(call: Callable[[], None]) -> None:
    """Call ``call`` before such an abort, in the thread that throws; a second call of this function does nothing.

    C++'s library must have been loaded, such as by torch. Loading it here could load an older one than torch needs.
    """
    if _kept:
        return
    try:
        library = ctypes.CDLL(LIBRARY, os.RTLD_NOW | os.RTLD_NOLOAD)
        set_terminate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)((SET_TERMINATE, library))
    except (OSError, AttributeError):
        return
    function = ctypes.CFUNCTYPE(None)

    def handle() -> None:
        with contextlib.suppress(Exception):
            call()
        set_terminate(before)
        function(before)()  # says what was thrown, and aborts

    _kept.append(function(handle))
    before = set_terminate(ctypes.cast(_kept[0], ctypes.c_void_p))
    atexit.register(set_terminate, before)  # C++ code may throw after the interpreter has ended
