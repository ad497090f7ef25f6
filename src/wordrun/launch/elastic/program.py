"""The program of the ranks that a guardian forks: what the guardian imports for it, and how a rank runs it."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

RUNNERS = (__file__, os.path.join(os.path.dirname(__file__), "guardian.py"), runpy.__file__, "<frozen runpy>")
"""Files whose frames begin the tracebacks of forked ranks."""
FOR_WORDRUN = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "wordrun.commands.train",
    "wordrun.train.trainer",
    "wordrun.train.language",
)
"""What ranks of wordrun import sooner or later. Importing starts neither threads of torch nor a device."""


def run(command: Sequence[str]) -> None:
    """Run ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS`` in this process as ``python`` would."""
    safe = getattr(sys.flags, "safe_path", False)
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.path[:0] = [] if safe else [os.getcwd()]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path[:0] = [] if safe else [os.path.dirname(os.path.realpath(command[0]))]
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:
        frames = _own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        raise SystemExit(1) from None


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the guardian and runpy, with which it begins."""
    first = frames
    while first and first.tb_frame.f_code.co_filename in RUNNERS:
        first = first.tb_next
    return first or frames


def import_before(setup: Mapping[str, Any]) -> None:
    """Import what the ranks will need."""
    if not setup["imports"]:
        return
    for name in ("torch", *(FOR_WORDRUN if setup["wordrun"] else ())):
        try:
            importlib.import_module(name)
        except ImportError:
            return  # the ranks may not need it
        except Exception:
            traceback.print_exc()
            return
