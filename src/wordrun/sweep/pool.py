"""Runs points at the same time, each as a launch of its own on its nodes, until they end or a signal arrives."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from wordrun import interrupts
from wordrun.errors import REQUEUE, ConfigError
from wordrun.launch import processes
from wordrun.launch.plan import is_stale
from wordrun.sweep.folder import Point, Sweep
from wordrun.sweep.placements import Placement

POLL_S = 0.1
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Running:
    """A point that is running."""

    point: Point
    placement: Placement
    process: subprocess.Popen[bytes]
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Ended:
    """A point that has ended."""

    point: Point
    status: int
    """launch's exit status."""
    seconds: float


class Pool:
    """Starts and watches launches; used as a context manager, which handles signals meanwhile."""

    def __init__(self, sweep: Sweep, placements: Sequence[Placement]) -> None:
        self.sweep = sweep
        self.free = list(placements)
        self.running: list[Running] = []
        self.ending = 0
        """The signal that ends the sweep, or 75 if a scheduler has asked a point to stop; no point starts then."""
        self._asked: set[int] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Pool:
        """Handle signals until the end of the ``with`` block."""
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, a shell's background job
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        """End what is still running, after an error, and restore the handlers."""
        for each in self.running:
            processes.send(each.process.pid, signal.SIGTERM)
        for each in self.running:
            each.process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, point: Point) -> None:
        """Start ``point`` in a free placement, which there must be.

        Raises:
            ConfigError: a file cannot be written.
        """
        placement = self.free[0]
        try:
            words = placement.words(self.sweep.options, self.sweep.dir / "hosts")
            point.log.parent.mkdir(parents=True, exist_ok=True)
            command = [*self.sweep.command, *point.overrides, f"hydra.run.dir={quoted(str(point.dir))}"]
            with point.log.open("ab") as log:
                log.write(f"$ {shlex.join(['launch', *words, *command])}\n".encode(errors="surrogateescape"))
                log.flush()
                process = subprocess.Popen(
                    [sys.executable, "-m", "wordrun.launch", *words, *command],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(point),
                    preexec_fn=processes.before_exec(own_group=True, death_signal=signal.SIGTERM),
                )  # fmt: skip
        except OSError as error:
            name = error.filename or point.log
            raise ConfigError(f"cannot start point {point.number}: {name}: {error.strerror}") from None
        self.running.append(Running(point, self.free.pop(0), process))
        if self.ending:  # the signal came in the meantime
            processes.send(process.pid, signal.SIGTERM)

    def _environment(self, point: Point) -> Mapping[str, str]:
        """Return the environment of a point: with a run ID of its own, and continuing what is in its directory."""
        kept = {name: value for name, value in os.environ.items() if not is_stale(name)}
        return {**kept, "WORDRUN_RUN_ID": f"{self.sweep.id}-{point.number}", "WORDRUN_RESUME": "auto"}

    def wait(self) -> list[Ended]:
        """Return the points that have ended, after a short time; their placements are free again."""
        time.sleep(POLL_S)
        ended = [each for each in self.running if each.process.poll() is not None]
        for each in ended:
            self.running.remove(each)
            self.free.append(each.placement)
            if each.process.returncode == REQUEUE and each.point.number not in self._asked:
                self.ending = self.ending or REQUEUE
        return [Ended(each.point, status(each.process), time.monotonic() - each.begun) for each in ended]

    def stop(self, point: Point) -> None:
        """Let a running point save and end."""
        if point.number not in self._asked:
            self._asked.add(point.number)
            for each in self.running:
                if each.point == point:
                    processes.send(each.process.pid, signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.taken()
        if not self.ending:
            count = len(self.running)
            points = f"{count} running point{'s' * (count != 1)}"
            text = f"stopping: no more points start; waiting for {points} to end\n"
            os.write(2, text.encode())
        self.ending = number
        for each in self.running:
            processes.send(each.process.pid, number)


def quoted(text: str) -> str:
    """Return ``text`` as a value for Hydra, which needs quotes around unusual characters."""
    plain = all(letter.isalnum() or letter in "_./+@:-" for letter in text)
    return text if plain else '"' + text.replace('"', '\\"') + '"'


def status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a process that has ended, as a shell reports it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
