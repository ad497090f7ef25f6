"""``wordrun tail RUN``: follow a run's log, also from another machine that sees its directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wordrun.common.section import Section
from wordrun.common.validation import not_negative
from wordrun.config.arguments import run, with_first
from wordrun.track.run_json import load, state_of

USAGE = """\
Show the end of a run's log, and follow it until the run ends. Ctrl-C stops following, not the run.

  wordrun tail                      # outputs/latest
  wordrun tail outputs/shakespeare/nano-DDP/20260101-120000-ab12 lines=50
"""
POLL_S = 0.5


@dataclass
class TailConfig(Section):
    """Which run to follow."""

    run: str = "outputs/latest"
    """Run directory."""
    lines: int = 20
    """Number of earlier lines to show first."""

    def problems(self) -> list[str]:
        return list(not_negative("", self, "lines"))


def main(argv: Sequence[str] | None = None) -> int:
    """Follow the run and return the exit status."""
    return run(TailConfig, USAGE, follow, with_first(argv, "run"))


def follow(options: TailConfig) -> None:
    """Print the end of the log of a run, and new text until the run has ended.

    Raises:
        UserError: the directory contains no run.
    """
    record = load(Path(options.run))
    log = record.path / "log.txt"
    position = 0
    if text := _read(log, 0):
        position = len(text)
        _write(b"".join(text.splitlines(keepends=True)[-options.lines :] if options.lines else []))
    for state in _states(record.path):
        size = log.stat().st_size if log.is_file() else 0
        if size < position:  # a resumed run has removed the lines of steps that it repeats
            position = 0
            _write(f"--- {log} was shortened by a resumed run ---\n".encode())
        if more := _read(log, position):
            position += len(more)
            _write(more)
        if state != "running":
            reason = load(record.path).facts.get("exit_reason", "")
            print(f"--- {state}{f': {reason}' if reason not in ('', state, 'running') else ''} ---")
            return


def _states(path: Path) -> Iterator[str]:
    """Yield a run's state repeatedly; after its end once more, since its last lines may have come in between."""
    state = "running"
    while state == "running":
        state = state_of(load(path))
        yield "running"
        if state == "running":
            time.sleep(POLL_S)
    yield state


def _read(file: Path, position: int) -> bytes:
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as stream:
            stream.seek(position)
            return stream.read()
    except OSError:
        return b""


def _write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
