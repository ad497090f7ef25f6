"""``wordrun study NAME [options] [overrides]``: the first word chooses the study.

A new study is one line in ``STUDIES``, and a module with ``main(argv) -> int``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from wordrun.common.errors import ConfigError, UserError, show
from wordrun.common.suggestions import nearest

STUDIES = {
    "scaling": ("wordrun.study.scaling", "throughput on 1, 2, 4, ... ranks or nodes, under several backends"),
    "coord": ("wordrun.study.coord", "activations and learning rates across widths, with and without muP"),
    "isoflop": ("wordrun.study.isoflop", "the best model size for each of several compute budgets (FLOPs)"),
}
"""Maps each study to its module and a line of help."""
OVERVIEW = """\
Run the same training several times with different options, and compare the results. Each run is a point of the study.

  wordrun study scaling --ranks 1,2,4 --out DIR model=gpt2

DIR/points.csv has a row for each point. To continue a study, start it again with the same --out DIR: finished points
are skipped, and --retry-failed repeats the failed ones.

Studies (wordrun study NAME --help):"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study in ``argv`` (default: the command line) and return its exit status."""
    name, *arguments = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    try:
        if name not in STUDIES:
            raise ConfigError(f"unknown study '{name}'{nearest(name, STUDIES)} (studies: {', '.join(STUDIES)})")
        status: int = importlib.import_module(STUDIES[name][0]).main(arguments)
    except UserError as error:
        return show(error)
    return status


def _overview() -> str:
    return "\n".join([OVERVIEW, *(f"  {name:<10}{summary}" for name, (_, summary) in STUDIES.items())])
