"""Python runs this at its start in programs that ``launch --hang`` starts, and then the user's own sitecustomize."""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _chain() -> None:
    """Run the sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get("WORDRUN_HANG_S"):
        with contextlib.suppress(Exception):  # such as a Python without wordrun, whose program runs all the same
            from wordrun.dist.hang import watch

            watch.start_from_env()
    _chain()
