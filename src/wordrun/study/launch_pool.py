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
from pathlib import Path
from types import FrameType
from typing import Any

from wordrun.common import sigint
from wordrun.common.errors import REQUEUE, ConfigError
from wordrun.launch import processes
from wordrun.launch.environment import is_stale
from wordrun.launch.sweeps_and_studies import quoted
from wordrun.study.placements import Placement
from wordrun.study.points import Point

POLL_S = 0.1
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Running:
    """A point that is running."""

    point: Point
    placements: Sequence[Placement]
    process: subprocess.Popen[bytes]
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Ended:
    """A point that has ended."""

    point: Point
    state: str
    """finished, stopped or failed."""
    seconds: float


class LaunchPool:
    """Starts and watches launches; used as a context manager, which handles signals meanwhile.

    Args:
        folder: the folder of the study or sweep.
        command: what starts wordrun, and the arguments that all points share before their overrides.
        launch: the options of launch that all points share.
        placements: where points can run; each takes one of them, or as many as it needs nodes.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], launch: Sequence[str], placements: Sequence[Placement]
    ) -> None:
        self.folder, self.command, self.launch = folder, command, launch
        self.free = list(placements)
        self.running: list[Running] = []
        self.ending = 0
        """If not 0, no more points start: a signal's number, or 75 if a scheduler has asked a point to stop."""
        self._asked: set[str] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> LaunchPool:
        """Handle signals until the end of the ``with`` block."""
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup and in a shell's background jobs
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

    def start(self, point: Point, nodes: int = 1) -> None:
        """Start ``point`` in so many of the free placements, which there must be.

        Raises:
            ConfigError: a file cannot be written.
        """
        taken, place = self.free[:nodes], Placement.of(self.free[:nodes])
        try:
            point.clear()
            # Named after the point, as other jobs may run points of this folder at the same time.
            words = place.words([*self.launch, *point.launch], self.folder / "hosts" / point.name)
            point.log.parent.mkdir(parents=True, exist_ok=True)
            command = command_of(self.command, point)
            with point.log.open("ab") as log:
                log.write(f"$ {shlex.join(['launch', *words, *command])}\n".encode(errors="surrogateescape"))
                log.flush()
                process = subprocess.Popen(
                    [sys.executable, "-m", "wordrun.launch", *words, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(point),
                    preexec_fn=processes.before_exec(own_group=True, death_signal=signal.SIGTERM),
                )
        except OSError as error:
            name = error.filename or point.log
            raise ConfigError(f"cannot start point {point.name}: {name}: {error.strerror}") from None
        self.running.append(Running(point, taken, process))
        self.free = self.free[nodes:]
        if self.ending:  # a signal came in the meantime
            processes.send(process.pid, signal.SIGTERM)

    def wait(self) -> list[Ended]:
        """Return the points that have ended, after a short time; their placements are free again."""
        time.sleep(POLL_S)
        ended = [each for each in self.running if each.process.poll() is not None]
        for each in ended:
            self.running.remove(each)
            self.free += each.placements
            if each.process.returncode == REQUEUE and each.point.name not in self._asked:
                self.ending = self.ending or REQUEUE
        now = time.monotonic()
        return [Ended(each.point, self._state(each.point, status(each.process)), now - each.begun) for each in ended]

    def _state(self, point: Point, code: int) -> str:
        """Return how a point has ended whose launch had the exit status ``code``."""
        state = point.state()
        if state in ("finished", "stopped"):  # after SIGTERM, a run without checkpoints ends with status 0
            return state
        return "stopped" if self.ending or code in (REQUEUE, 130, 143) else "failed"

    def stop(self, point: Point) -> None:
        """Let a running point save and end."""
        if point.name not in self._asked:
            self._asked.add(point.name)
            for each in self.running:
                if each.point == point:
                    processes.send(each.process.pid, signal.SIGTERM)

    @property
    def exit_status(self) -> int:
        """The exit status after a signal, or after a scheduler has asked a point to stop."""
        return REQUEUE if self.ending in (REQUEUE, signal.SIGTERM) else 128 + self.ending

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            sigint.taken(self._before.get(number))
        if not self.ending:
            count = len(self.running)
            points = f"{count} running point{'s' * (count != 1)}"
            text = f"stopping: no more points start; waiting for {points} to end\n"
            os.write(2, text.encode())
        self.ending = number
        for each in self.running:
            processes.send(each.process.pid, number)


def command_of(command: Sequence[str], point: Point) -> list[str]:
    """Return the command of each rank of ``point``."""
    return [*command, *point.overrides, f"hydra.run.dir={quoted(os.path.abspath(point.dir))}"]


def environment(point: Point) -> Mapping[str, str]:
    """Return the environment of a point's launch; a run ID in it lets the launch continue the run in its directory."""
    own = ("WORDRUN_RUN_ID", "WORDRUN_RESUME")
    kept = {name: value for name, value in os.environ.items() if not is_stale(name) and name not in own}
    return kept | (dict(zip(own, (point.run_id, "auto"), strict=True)) if point.run_id else {})


def status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a process that has ended, as a shell reports it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
