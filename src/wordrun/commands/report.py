"""``wordrun report run=DIR`` and ``wordrun report runs=DIR,...``."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wordrun.common.errors import ConfigError
from wordrun.common.run_dir import find
from wordrun.common.section import Section
from wordrun.config.arguments import run, with_first

USAGE = """\
Write a page with a run's curves, options and environment, or one that compares several runs.

  wordrun report                                        # outputs/latest
  wordrun report run=outputs/shakespeare/nano-DDP/20260101-120000-ab12
  wordrun report runs=outputs/shakespeare               # all runs below a folder
  wordrun report runs='outputs/*/nano-*' out=nano.html  # several folders: a pattern, or separated by commas

The page is a single file, and needs no server, scripts or network.
"""


@dataclass
class ReportConfig(Section):
    """Which runs to show."""

    run: str = "outputs/latest"
    """Run directory."""
    runs: str | None = None
    """Folders of several runs to compare: run directories or folders above them, patterns, separated by commas."""
    out: str | None = None
    """File to write; null: report.html in the run directory, or in the working directory for several runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and return the exit status."""
    return run(ReportConfig, USAGE, report, with_first(argv, "run"))


def report(options: ReportConfig) -> None:
    """Write the page and print its path.

    Raises:
        UserError: there is no such run, or the file cannot be written.
    """
    from wordrun.track.report import page

    if options.runs is None:
        (file,) = page.write(Path(options.run), Path(options.out) if options.out else None)
    else:
        file = page.compare(runs_in(options.runs), Path(options.out or "report.html"))
    print(file)


def runs_in(text: str) -> list[Path]:
    """Return the run directories that ``runs=`` names, each once, in the order named.

    Raises:
        ConfigError: a name or pattern matches no run.
    """
    found: dict[Path, None] = {}
    for pattern in filter(None, (part.strip() for part in text.split(","))):
        paths = [run for folder in sorted(glob.glob(pattern)) for run in find(Path(folder).resolve())]
        if not paths:
            raise ConfigError(f"runs={pattern}: there is no run there; wordrun ls shows the runs below outputs/")
        found |= dict.fromkeys(paths)
    if not found:
        raise ConfigError("runs= names no folder: give run directories or folders above them, separated by commas")
    return list(found)
