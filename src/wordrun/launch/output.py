"""Forward the output of the ranks and the launcher: in whole lines, and without lines that explain nothing.

On one machine each rank has two named pipes of its own, so launch knows which rank wrote a line. Elsewhere the output
of all ranks arrives through the launcher, mixed.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from wordrun.launch.output_tail import Tail

# An incomplete line, such as a prompt, is forwarded once nothing else has been forwarded for this long [s], so that
# other ranks' lines do not end up in it, and after the longer time in any case.
PARTIAL_S, MIXED_S = 0.1, 1.0
# More ranks than this share the launcher's pipes: a process may have 1024 files open.
MOST_RANKS = 200
# The record keeps this many lines of what was not shown.
MOST_FOLDED = 200
# One read returns what a pipe usually holds; a pipe may hold 16 times as much.
READ, MOST_READS = 65536, 16
# A pipe that can be written to takes this much without waiting.
PIPE_BUF = select.PIPE_BUF
TRACEBACK = re.compile(rb"^(Traceback \(most recent call last\)|Fatal Python error)", re.MULTILINE)


@dataclass
class Pipe:
    """A pipe that ranks or the launcher write to."""

    fd: int
    sink: int
    """1 or 2: where launch forwards it."""
    rank: int | None = None
    """The only rank that writes to it."""
    own: bool = False
    """Whether only the launcher writes to it."""
    pending: bytes = b""
    """The beginning of a line whose end has not arrived."""
    since: float = 0.0
    """When it began to wait."""
    held: bytes | None = None
    """After Ctrl-C, the rank's traceback and what follows it."""

    def complete_lines(self, chunk: bytes) -> bytes:
        """Return the complete lines with ``chunk``, and keep the rest; at the end of the pipe (b""), return all."""
        data = self.pending + chunk
        # A carriage return begins a line that overwrites the last one.
        end = max(data.rfind(b"\n") + 1, data.rfind(b"\r"), 0) if chunk else len(data)
        if not self.pending or end:
            self.since = time.monotonic()
        self.pending = data[end:]
        return data[:end]

    def take_pending(self) -> bytes:
        """Return the incomplete line, and keep nothing of it."""
        part, self.pending = self.pending, b""
        return part

    def hold_traceback(self, text: bytes) -> bytes:
        """Hold ``text`` back from the traceback on, if one has begun; return what comes before it."""
        if self.held is not None:
            self.held += text
            return b""
        begin = TRACEBACK.search(text)
        if begin is None:
            return text
        self.held = text[begin.start() :]
        return text[: begin.start()]

    def take_held(self) -> bytes:
        """Return what was held back, and hold it no longer."""
        held, self.held = self.held or b"", None
        return held


@dataclass
class Output:
    """All pipes of a launch."""

    noise: str = ""
    """Regular expression for what the launcher or MPI prints with a failure but that does not explain it."""
    own_lines: str = ""
    """Regular expression for the beginning of the launcher's lines."""
    pipes: str = ""
    """The folder for the ranks' own pipes; empty: they have none."""
    tail: Tail = field(default_factory=Tail)
    """The end of what was shown on stderr."""
    tails: dict[int, Tail] = field(default_factory=dict)
    """The end of each rank's stderr, if it has pipes of its own."""
    folded: list[str] = field(default_factory=list)
    """Lines that were not shown."""
    quiet: bool = False
    """Whether ``launch`` has reported what happened; from then on, the launcher's own lines are not shown."""
    report: bytes = b""
    """The launcher's own stdout, such as MPICH's account of a failure, which is shown at the end or not at all."""
    interrupted: bool = False
    """Whether Ctrl-C was forwarded; from then on, a rank's KeyboardInterrupt is not shown."""
    killed: str = ""
    """Regular expression for the line of the launcher, or of its MPI library, about a process killed by SIGKILL."""
    launch_id: str = ""
    """Begins the lines in which ranks report how they end if they cannot write to the status folder."""
    reports: list[tuple[str, str]] = field(default_factory=list)
    """What those lines say: the name of the file that could not be written, and its contents."""
    names_kill: bool = False
    """Whether the launcher has written a line that matches ``killed``."""
    lost: str = ""
    """Why output could not be written, such as a full disk; empty: there was no error except a reader that has gone."""
    stuck: dict[int, bytearray] = field(default_factory=dict)
    """What could not be written yet to our stdout (1) or stderr (2), because the reader, such as a pager, is paused."""
    wrote: dict[int, float] = field(default_factory=lambda: {1: 0.0, 2: 0.0})
    """When something was last forwarded to stdout (1) and stderr (2)."""

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        noise = [self.noise] * bool(self.noise)
        own = [f"^({self.own_lines}).*\n"] * bool(self.own_lines)
        # Launchers may begin it with a label.
        line = rf"(?:\[\d+\] |\d+: )?launch {self.launch_id}: (\S+) ([^\r\n]+)\r?\n" if self.launch_id else "(?!)"
        self._report = re.compile(line.encode())
        # The index is ``quiet``.
        self._patterns = [
            re.compile("|".join(some or ["(?!)"]).encode(), re.MULTILINE) for some in (noise, noise + own)
        ]

    def open_pipes(self, ranks: int) -> None:
        """Create the ranks' pipes, which rank_env.sh looks for; if that fails, there are none."""
        try:
            for rank in range(ranks):
                self.tails[rank] = Tail()
                for sink, name in ((1, "out"), (2, "err")):
                    path = os.path.join(self.pipes, f"{rank}.{name}")
                    os.mkfifo(path, 0o600)
                    # Open for writing as well, so that it does not end when a rank closes it.
                    self.add(Pipe(os.open(path, os.O_RDWR | os.O_NONBLOCK), sink, rank))
        except OSError:  # the file system has no named pipes, or this process may not open so many files
            for pipe in self._open_pipes():
                self._close(pipe)
            for name in os.listdir(self.pipes):
                os.unlink(os.path.join(self.pipes, name))
            self.pipes = ""
            self.tails.clear()

    def hush(self, *, interrupted: bool = False) -> None:
        """From now on, hide the launcher's own lines and (``interrupted``) any KeyboardInterrupt."""
        self.quiet = True
        self.interrupted |= interrupted

    def add(self, pipe: Pipe) -> None:
        """Forward ``pipe`` from now on."""
        self.selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def select(self, timeout: float) -> list[selectors.SelectorKey]:
        """Return what can be read within ``timeout`` seconds; while our own output is stuck, nothing from the ranks."""
        if not self.stuck:
            return [key for key, _ in self.selector.select(timeout)]
        others = [key for key in self.selector.get_map().values() if not isinstance(key.data, Pipe)]
        readable, _, _ = select.select([key.fd for key in others], list(self.stuck), [], timeout)
        for sink in list(self.stuck):
            self._write(sink, b"")
        return [key for key in others if key.fd in readable]

    def pump(self, pipe: Pipe) -> None:
        """Forward what has arrived, in whole lines; stop at the end of the pipe, or when our own output is closed."""
        chunk = os.read(pipe.fd, READ)
        if chunk and pipe.own and pipe.sink == 1:
            self.report += chunk
            return
        if not (self._show(pipe, pipe.complete_lines(chunk)) and chunk):
            self._close(pipe)

    def forward_partial(self, *, at_once: bool = False) -> bool:
        """Forward incomplete lines that have waited long enough; return whether others still wait."""
        waiting = False
        # If this process had to wait for a core, the end of such a line may have arrived meanwhile.
        unread = set() if at_once else {key.fd for key, _ in self.selector.select(0)}
        for pipe in self._open_pipes():
            now, since = time.monotonic(), pipe.since
            quiet_since = now if unread else max(since, self.wrote[pipe.sink])
            due = at_once or now > min(quiet_since + PARTIAL_S, since + MIXED_S)
            if pipe.pending and due and pipe.fd not in unread and not self._show(pipe, pipe.take_pending()):
                self._close(pipe)
            waiting |= bool(pipe.pending)
        return waiting

    def drain(self) -> None:
        """Forward everything written so far, even if a process that a rank left behind keeps writing."""
        for _ in range(MOST_READS):
            for key, _ in self.selector.select(0):
                if isinstance(key.data, Pipe):
                    self.pump(key.data)
        self.forward_partial(at_once=True)

    def close(self, patience_s: float | None = None) -> None:
        """Forward the rest and close all pipes.

        Args:
            patience_s: wait at most this long for our output to be read; None: until it is read, or a signal arrives.
        """
        self.drain()
        self._look_for_kill(self.report)
        if self.quiet:
            self._fold(self.report)
        else:
            self._write(1, self.report)
        for pipe in self._open_pipes():
            held = pipe.take_held()
            if b"KeyboardInterrupt" in held:
                self._fold(held)
            elif held:
                self.interrupted = False
                self._show(pipe, held)
            self._close(pipe)
        until = None if patience_s is None else time.monotonic() + patience_s
        while self.stuck and (until is None or time.monotonic() < until):
            for key in self.select(PARTIAL_S):  # numbers of signals
                if set(os.read(key.fd, 512)) - {signal.SIGCHLD}:
                    self.stuck.clear()
        self.selector.close()

    def lines_of(self, rank: int) -> Iterable[str]:
        """Return the last lines on stderr, of ``rank`` alone if it has pipes of its own."""
        return (self.tails.get(rank) or self.tail).lines()

    def _show(self, pipe: Pipe, text: bytes) -> bool:
        """Write whole lines; return whether our own output is still open."""
        if pipe.rank is None or pipe.sink == 2:
            self._look_for_kill(text)
            self.reports += [(name.decode(), report.decode()) for name, report in self._report.findall(text)]
            text = self._report.sub(b"", text)
        if pipe.own and self.quiet:
            self._fold(text)
            return True
        if pipe.sink == 2 or pipe.rank is None:
            for match in self._patterns[self.quiet].finditer(text):
                self._fold(match[0])
            text = self._patterns[self.quiet].sub(b"", text)
        if pipe.sink == 2 and pipe.rank is not None:
            self.tails[pipe.rank].add(text)
            if self.interrupted or pipe.held is not None:
                text = pipe.hold_traceback(text)
        if pipe.sink == 2:
            self.tail.add(text)
        return self._write(pipe.sink, text)

    def _look_for_kill(self, text: bytes) -> None:
        if self.killed and re.search(self.killed.encode(), text, re.MULTILINE):
            self.names_kill = True

    def _fold(self, text: bytes) -> None:
        self.folded += [line for line in text.decode(errors="replace").splitlines() if line.strip()]
        del self.folded[:-MOST_FOLDED]

    def _write(self, sink: int, text: bytes) -> bool:
        """Write as much as possible without waiting, and keep the rest; return whether our own output is still open."""
        rest = self.stuck.pop(sink, bytearray()) + text
        if text:
            self.wrote[sink] = time.monotonic()
        done = 0
        try:
            while done < len(rest) and select.select([], [sink], [], 0)[1]:
                done += os.write(sink, rest[done : done + PIPE_BUF])
        except BlockingIOError:  # another process has made it non-blocking, and has filled it
            pass
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # such as a full disk
                self.lost = f"cannot write to {('stdout', 'stderr')[sink - 1]}: {error.strerror}"
            return False
        if done < len(rest):
            self.stuck[sink] = rest[done:]
        return True

    def _open_pipes(self) -> list[Pipe]:
        return [key.data for key in self.selector.get_map().values() if isinstance(key.data, Pipe)]

    def _close(self, pipe: Pipe) -> None:
        self.selector.unregister(pipe.fd)
        os.close(pipe.fd)
