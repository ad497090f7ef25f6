"""Lets Python processes that tests start draw no plots and no report, as ``forked.undrawn``: it is half of a small run.

Tests that look at them set ``DRAWN_BY_TESTS``.
Python imports this file at its start from PYTHONPATH.
"""

import atexit
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any


def _draw_nothing(run: ModuleType) -> None:
    vars(run).update(page=SimpleNamespace(write=lambda path, **_: []), drawing_of_users={"page": run.page})


class Undrawn:
    """Finds the module that has a run drawn, and changes it as soon as it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of this module."""
        if name != "wordrun.train.run" or os.environ.get("DRAWN_BY_TESTS"):
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec
        assert spec.loader
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _draw_nothing(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if programs := os.environ.get("PROGRAMS_OF_TESTS"):
    import stand_in

    if words := stand_in.program_of(sys.orig_argv):
        stand_in.run(words, programs)
sys.meta_path.insert(0, Undrawn)
gc.set_threshold(20_000, 50, 50)  # at Python's own, importing torch looks for garbage for a fifth of its time
atexit.register(gc.freeze)  # the exit would look through torch for garbage, for 0.4 s
