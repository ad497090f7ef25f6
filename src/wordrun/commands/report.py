"""``wordrun report run=DIR,...``."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from wordrun.common.errors import ConfigError
from wordrun.common.run_dir import find
from wordrun.common.section import Section
from wordrun.config.arguments import run, with_first

USAGE = """\
Write a page with a run's curves, options and environment, or one that compares several runs.

  wordrun report                                        # outputs/latest
  wordrun report run=outputs/shakespeare/nano-DDP/20260101-120000-ab12
  wordrun report run=outputs/shakespeare                # compare all runs below a folder
  wordrun report run='outputs/*/nano-*' out=nano.html   # several folders: a pattern, or separated by commas

The page is a single file, and needs no server, scripts or network.
"""


@dataclass
class ReportConfig(Section):
    """Which runs to show."""

    FORMER: ClassVar[dict[str, str]] = {"runs": "run"}

    run: str = "outputs/latest"
    """Run directory; or several runs to compare: folders above them, patterns, separated by commas."""
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

    folder = Path(options.run)
    below = folder.is_dir() and list(find(folder.resolve())) not in ([], [folder.resolve()])
    if below or (re.search(r"[,*?\[]", options.run) and not folder.exists()):
        file = page.compare(runs_in(options.run), Path(options.out or "report.html"))
    else:
        (file,) = page.write(folder, Path(options.out) if options.out else None)
    print(file)


def runs_in(text: str) -> list[Path]:
    """Return the run directories that ``run=`` names, each once, in the order named.

    Raises:
        ConfigError: a name or pattern matches no run.
    """
    found: dict[Path, None] = {}
    for pattern in filter(None, (part.strip() for part in text.split(","))):
        paths = [run for folder in sorted(glob.glob(pattern)) for run in find(Path(folder).resolve())]
        if not paths:
            raise ConfigError(f"run={pattern}: there is no run there; wordrun ls shows the runs below outputs/")
        found |= dict.fromkeys(paths)
    if not found:
        raise ConfigError("run= names no folder: give run directories or folders above them, separated by commas")
    return list(found)
