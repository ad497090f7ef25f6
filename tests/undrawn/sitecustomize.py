"""Lets Python processes that tests start draw no plots and no report, as ``forked.undrawn``: it is half of a small run.

Tests that look at them set ``DRAWN_BY_TESTS``. The processes also share config trees: see ``kept_trees``.
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


def _share_trees(tree: ModuleType) -> None:
    import kept_trees  # in few processes

    vars(tree).update(_kept=kept_trees.shared(tree))


CHANGES = {"wordrun.train.run": _draw_nothing, "wordrun.tree": _share_trees}
if os.environ.get("DRAWN_BY_TESTS"):
    del CHANGES["wordrun.train.run"]


class Undrawn:
    """Finds the modules that have a run drawn and a config composed, and changes them as soon as they are loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of such a module."""
        if name not in CHANGES:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec
        assert spec.loader
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if programs := os.environ.get("PROGRAMS_OF_TESTS"):
    import stand_in

    if words := stand_in.program_of(sys.orig_argv):
        stand_in.run(words, programs)
sys.meta_path.insert(0, Undrawn)
gc.set_threshold(20_000, 50, 50)  # at Python's own, importing torch looks for garbage for a fifth of its time
atexit.register(gc.freeze)  # the exit would look through torch for garbage, for 0.4 s
