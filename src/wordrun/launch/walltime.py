"""The time limit of a job (walltime), and the margin before its end at which the ranks are warned by SIGUSR1."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from wordrun.launch.messages import say
from wordrun.launch.options import Options

# Default --walltime-margin for wordrun: MARGIN_S seconds, but at most 1/MARGIN_PART of the walltime.
MARGIN_S = 120.0
MARGIN_PART = 20


def seconds(walltime: str) -> int:
    """Convert ``[D-]H:MM:SS`` to seconds.

    Raises:
        ValueError: ``walltime`` has another format.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", walltime)
    if not match:
        raise ValueError("should be H:MM:SS, such as 1:00:00")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + rest


def default_margin(options: Options) -> float | None:
    """Return --walltime-margin [s], or its default for wordrun's training; None: no margin.

    Other commands have no default, because SIGUSR1 kills programs that do not handle it.
    """
    if options.walltime_margin is not None or options.walltime is None or not options.trains:
        return options.walltime_margin
    return min(MARGIN_S, seconds(options.walltime) // MARGIN_PART)


class WalltimeWarning:
    """The moment at which the ranks of a running launch have to be warned.

    A thread asks the scheduler for the time limit, because the answer may be slow.
    """

    def __init__(self) -> None:
        self._at = float("inf")  # seconds since 1970
        self._asking: threading.Thread | None = None

    def begin(self, ask: Callable[[], float | None], margin_s: float, is_running: Callable[[], bool]) -> None:
        """Find out the moment, in a thread.

        Args:
            ask: returns when the walltime ends, in seconds since 1970; None: unknown.
            margin_s: how many seconds before that the ranks are warned.
            is_running: returns whether the launch still runs.
        """

        def find_out() -> None:
            end = ask()
            if end is not None:
                self._at = end - margin_s
            elif is_running():
                unknown = "cannot determine the job's end time, so ranks will not be warned"
                say(f"--walltime-margin {margin_s:g}: {unknown}")

        self._asking = threading.Thread(target=find_out, daemon=True)
        self._asking.start()

    @property
    def is_asking(self) -> bool:
        """Whether the scheduler's command may be running, as a child of this process."""
        return self._asking is not None and self._asking.is_alive()

    def take(self) -> bool:
        """Return True once, when it is time to warn the ranks."""
        if time.time() <= self._at:
            return False
        self._at = float("inf")
        return True
