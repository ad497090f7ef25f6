"""Lets Python processes that tests start draw no plots and no report, as ``forked.undrawn``: it is half of a small run.

Python imports this file at its start from PYTHONPATH.
"""

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any


class Undrawn:
    """Finds the module that has a run drawn, and changes it as soon as it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of that one module."""
        if name != "wordrun.train.run":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec
        assert spec.loader
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            page = SimpleNamespace(write=lambda run_dir: run_dir / "report.html")
            vars(module).update(draw=lambda *_: [], page=page, load_beside=lambda: None)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Undrawn)
gc.set_threshold(20_000, 50, 50)  # at Python's own, importing torch looks for garbage for a fifth of its time
