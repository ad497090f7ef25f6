"""Notice that a rank makes no progress, and have all ranks report where they are.

Each rank has a thread that checks once a second whether the main thread has advanced a counter. Nothing is sent while
the run makes progress. When a rank is late, its thread leaves a request in a folder that all hosts share. The thread of
each rank finds the request, and answers with a file of the rank's stacks and the collectives that it waits for. The
lowest rank that answers combines the files into one message (``report.py``). If a rank cannot answer, because its
process was stopped or its interpreter's lock is held, another rank on its host answers for it. Files are used because,
unlike the store, they do not depend on rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from wordrun.common import exit_reports, files, slurm, stack_requests
from wordrun.common.log import LOGGER
from wordrun.dist.hang import flight_recorder, report, stacks
from wordrun.dist.mesh import Layout
from wordrun.dist.world import World, discover

# Start-up, the first step (which compiles), samples and saves may take this many times as long as other steps.
SLOW = 5.0
# Ranks wait at most this long for each other's answers to a report of a hang.
ANSWER_S = 40.0
TICK_S = 1.0
# Seconds without progress that count as a hang before the config is known; start-up may take SLOW times as long.
START_S = 120.0
# All ranks together look for requests this often per second, because they load one metadata server.
LOOKS_PER_S = 500.0
EARLIER = 0.8  # a hang is reported at the latest after this share of the time limit of collectives
ASKED_S = 10.0  # ranks wait at most this long for each other's answers if they are asked without a hang
# Ranks reach init_process_group at different times, so they may wait there this many times as long.
START_FACTOR = 5.0


class Watch:
    """Watches this process until ``close``.

    Args:
        world: this rank.
        folder: where requests, answers and reports go; the same for all ranks, and created when it is needed.
        hang_s: seconds without progress that count as a hang; 0: only answer questions.
        waits: whether to watch the main thread for waits, in programs that do not call ``phase`` and ``mark``.
        timeout_s: seconds after which a collective fails; a hang is reported earlier, whatever its limit.
        forced: whether ``hang_s`` also counts for the watches that open before this one is closed (``launch --hang``).
    """

    opened: ClassVar[list[Watch]] = []
    """The watches of this process that are not closed, the newest last: a notebook may have several trainers. The
    functions of this module apply to the newest."""

    def __init__(
        self,
        world: World,
        folder: Path,
        hang_s: float,
        timeout_s: float = math.inf,
        *,
        waits: bool = False,
        forced: bool = False,
    ) -> None:
        hang_s = next((other.forced_s for other in self.opened if other.forced_s), hang_s)
        self.forced_s: float = hang_s if forced else 0.0
        self.world, self.folder, self._most = world, folder, EARLIER * timeout_s
        self.hang_s = min(hang_s, self._most) if hang_s else math.inf
        self.waits: Callable[[], float] = Waits(self.hang_s) if waits else float
        self.reported: Path | None = None
        self.step: int | None = None
        self.layout = Layout()  # until it is known
        self._count, self._phase, self._factor = 0, "", math.inf
        self._known = set[str]()  # phases that have been seen once
        self._name = f"wordrun-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        self._answered = ""
        self._put_off = -math.inf, -math.inf
        """When a report of the present wait was first and last put off, on the monotonic clock."""
        self._reports = os.environ.get("WORDRUN_STATUS_DIR", "")
        """The folder with reports of which ranks have ended."""
        self._tick = min(TICK_S, self.hang_s / 8)
        self._every = max(self._tick, self.world.size / LOOKS_PER_S)
        """Seconds between checks for requests."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._dump = stacks.Dump(self._name, world.rank)
        self._thread.start()
        self.opened.append(self)

    def close(self) -> None:
        """Stop watching."""
        self.opened.remove(self)
        self._ended.set()
        if threading.current_thread() is not self._thread:  # a trainer may be garbage-collected in that thread
            self._thread.join(TICK_S)
        if not self._thread.is_alive():  # otherwise it is about to report something
            self._dump.close()
        if self.opened:
            self.opened[-1]._dump.register()

    def mark(self, step: int | None = None, layout: Layout | None = None) -> None:
        """Note progress; see the function ``mark``."""
        self._count += 1
        self.layout = layout or self.layout
        if step is not None:
            self.reported = None
            if self.step is not None:
                self._known.add("training")
            self.step = step

    @contextlib.contextmanager
    def phase(self, name: str, factor: float = 1.0) -> Iterator[None]:
        """Name what the main thread does; see the function ``phase``."""
        before = self._phase, self._factor
        self._phase, self._factor = name, factor
        self._count += 1
        try:
            yield
            self._known.add(name)
        finally:
            self._phase, self._factor = before
            self._count += 1

    @property
    def limit(self) -> float:
        """Seconds without progress that count as a hang now."""
        first = 1.0 if self._phase in self._known else SLOW
        limit = self.hang_s * max(self._factor, first)
        return limit if math.isinf(limit) else min(limit, self._most)

    @property
    def longest(self) -> float:
        """Seconds without progress that count as a hang even if a rank is compiling."""
        return min(SLOW * self.limit, self._most)

    def ask(self, seconds: float = 0.0) -> bool:
        """Ask all ranks where they are, unless another rank has just asked; return whether that was possible.

        Args:
            seconds: for how long there has been no progress; 0: the question is not about a hang.
        """
        try:
            stack_requests.request(self.folder, seconds)
        except OSError as error:  # such as a full disk
            since = f"no progress for {seconds:g} s: " if seconds else ""
            line = stacks.user_line(stacks.own())
            LOGGER.error("%sat %s; cannot ask other ranks: %s: %s", since, line, error.filename, error.strerror)
            return False
        return True

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # signals are for the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        count, since, look_at, ask_at = -1, 0.0, 0.0, 0.0
        while not self._ended.wait(self._tick):
            now = time.monotonic()
            if self._count != count:
                count, since, ask_at = self._count, now, 0.0
            try:
                if self._dump.asked():
                    self.ask()
                    look_at = now
                limit = self.limit
                exceeded = limit if now - since > limit else self.waits() if self.opened[-1:] == [self] else 0.0
                if exceeded and now >= ask_at and (now - since > self.longest or not stacks.compiles(stacks.own())):
                    ask_at = now + limit if self.ask(exceeded) else math.inf
                    look_at = now
                if now >= look_at:
                    look_at = now + self._every
                    ask_at = max(ask_at, now + self._answer(now - since))
            except Exception as error:  # such as a folder that is gone; the run must not suffer
                LOGGER.warning("cannot report where the ranks are: %r", error)
                look_at = time.monotonic() + ANSWER_S

    def _answer(self, idle_s: float) -> float:
        """Answer a new request, and report if no lower rank answers.

        Returns:
            For how many seconds this rank should not ask: infinite once a hang is reported.
        """
        asked = files.read_json(self.folder / stack_requests.REQUEST)
        if not asked or asked["id"] == self._answered:
            return 0.0
        self._answered = asked["id"]
        answers, before = self.folder / asked["id"], self._reports_of_hangs()
        try:
            files.replace(answers / f"{self.world.rank}.json", json.dumps(self._own_answer(idle_s)))
        except FileNotFoundError:  # the report is finished
            return math.inf if asked["seconds"] else 0.0
        patience = min(ANSWER_S, max(self.hang_s, 2.0)) if asked["seconds"] else ASKED_S
        self._wait(answers, patience)
        if answers.is_dir() and not any((answers / f"{rank}.json").exists() for rank in range(self.world.rank)):
            self._report(asked, answers)
        if not asked["seconds"]:
            return 0.0
        return math.inf if self._reports_of_hangs() > before else float(asked["seconds"])

    def _reports_of_hangs(self) -> int:
        return len(list(self.folder.glob("hang-*.txt")))

    def _wait(self, answers: Path, patience: float) -> None:
        """Wait until the report is finished or, on rank 0, everybody has answered; answer for others meanwhile."""
        begun, helped = time.monotonic(), False
        # Other ranks report only in place of rank 0.
        until = begun + patience * (1.0 if self.world.rank == 0 else 1.3)
        while time.monotonic() < until and answers.is_dir():
            if self.world.rank == 0:
                known = len(list(answers.glob("*[0-9].json"))) + len(exit_reports.ended(self._reports))
                if known >= self.world.size:
                    return
            if not helped and time.monotonic() > begun + patience / 2:
                helped = True
                self._answer_for_others(answers)
            time.sleep(min(max(0.1, self.world.size / LOOKS_PER_S), patience / 10))

    def _answer_for_others(self, answers: Path) -> None:
        """Answer for ranks on this host that have not, if this is the lowest rank that has."""
        here = sorted(stacks.peers(self._name))
        silent = [peer for peer in here if not (answers / f"{peer[0]}.json").exists()]
        if min((rank for rank, _, _ in here if rank not in {s[0] for s in silent}), default=-1) != self.world.rank:
            return
        for rank, pid, path in silent:
            found, letter = stacks.ask(pid, path), stacks.state(pid)
            answer = report.Answer(
                rank,
                self.world.host,
                pid,
                line=stacks.user_line(found) if found else "",
                spoken_for=True,
                stacks={name: list(each) for name, each in found.items()},
                state=stacks.STATES.get(letter, ""),
            )
            with contextlib.suppress(FileNotFoundError):
                # Not under the name of an own answer: that rank will not write the report.
                files.replace(answers / f"for-{rank}.json", json.dumps(vars(answer)))

    def _own_answer(self, idle_s: float) -> dict[str, Any]:
        found = stacks.own()
        seen = report.collectives(self.world.size)
        return vars(
            report.Answer(
                self.world.rank,
                self.world.host,
                os.getpid(),
                phase=self._phase,
                step=self.step,
                idle_s=idle_s,
                stacks={name: list(each) for name, each in found.items()},
                line=stacks.user_line(found),
                call=stacks.torch_call(found) or stacks.mpi_call(found),
                **seen,
            )
        )

    def _report(self, asked: dict[str, Any], answers: Path) -> None:
        found = [report.Answer(**each) for path in answers.glob("*[0-9].json") if (each := files.read_json(path))]
        found.sort(key=lambda answer: answer.rank)
        hangs = bool(asked["seconds"])
        compiling = [answer.rank for answer in found if stacks.compiles(answer.stacks)]
        if hangs and compiling and self._may_put_off(asked["seconds"]):
            verb = "compile" if compiling[1:] else "compiles"
            LOGGER.info("%s %s; no progress for %g s", report.names(compiling), verb, asked["seconds"])
            stack_requests.withdraw(self.folder, asked["id"])
            return
        name = f"{'hang' if hangs else 'stacks'}-{time.strftime('%Y%m%d-%H%M%S')}"
        taken = len(list(self.folder.glob(f"{name}*.txt")))
        path = self.folder / f"{name}{f'-{taken + 1}' if taken else ''}.txt"
        lead = f"no progress for {asked['seconds']:g} s" if hangs else "where the ranks are now"
        ended = exit_reports.ended(self._reports)
        text = f"{lead}: {report.describe(found, self.world, self.layout, ended, hangs=hangs)}"
        files.replace(path, f"{text}\n\n{report.all_stacks(found)}")
        self.reported = path if hangs else None
        log = LOGGER.error if hangs else LOGGER.warning
        log("%s. Stacks of all ranks: %s; more: docs/hangs.md#a-hang", text, os.path.relpath(path))
        stack_requests.withdraw(self.folder, asked["id"])

    def _may_put_off(self, seconds: float) -> bool:
        """Return whether ranks that have waited ``seconds`` or longer may wait for a rank that compiles."""
        now = time.monotonic()
        first, last = self._put_off
        if now - last > 2 * seconds + ANSWER_S:  # that was another wait
            first = now
        self._put_off = first, now
        return now - first < self.longest - seconds


class Waits:
    """Notices waits of the main thread in a program that does not call ``mark``."""

    def __init__(self, hang_s: float) -> None:
        self.hang_s = hang_s
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        """How many collectives of each group have begun and ended, and since when these numbers have not changed."""
        self._call: tuple[Any, float] = None, 0.0
        """The main thread's call of torch.distributed, such as recv, which torch does not count, and since when."""
        self._pulse = stacks.Pulse()

    def __call__(self) -> float:
        """Return the limit in seconds if the main thread has waited longer than that for other ranks, else 0."""
        now, idle_s = time.monotonic(), self._pulse()
        # This keeps the frame alive, so that a later call has a different one.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or stacks.IN_TORCH not in frame.f_code.co_filename:
            self._call = None, now
        elif frame is not self._call[0]:
            self._call = frame, now
        limit = self.hang_s if report.is_joined() else START_FACTOR * self.hang_s
        if now - self._call[1] > limit:
            return limit
        counts = flight_recorder.collective_counts() if report.is_joined() else {}
        self._seen = {
            group: seen if (seen := self._seen.get(group)) and seen[0] == count else (count, now)
            for group, count in counts.items()
        }
        waits = any(ended < begun and now - since > self.hang_s for (begun, ended), since in self._seen.values())
        return self.hang_s if waits or (idle_s > self.hang_s and stacks.mpi_call(stacks.own())) else 0.0


def reported() -> Path | None:
    """Return the report of a hang since the last step, on the rank that wrote it (rank 0 if possible); else None."""
    return Watch.opened[-1].reported if Watch.opened else None


def start(world: World, run_dir: str, hang_s: float, timeout_s: float) -> Watch:
    """Watch this rank of a run, with reports in ``failures`` of its directory; see ``Watch``."""
    return Watch(world, Path(run_dir).absolute() / "failures", hang_s, timeout_s)


def mark(step: int | None = None, layout: Layout | None = None) -> None:
    """Note that the main thread makes progress, is about to take ``step`` (from 0), or knows the ranks' ``layout``."""
    if Watch.opened:
        Watch.opened[-1].mark(step, layout)


@contextlib.contextmanager
def phase(name: str, factor: float = 1.0) -> Iterator[None]:
    """Name what the main thread does in a ``with`` block or function; ``factor`` multiplies the limit of a hang."""
    with Watch.opened[-1].phase(name, factor) if Watch.opened else contextlib.nullcontext():
        yield


def folder_of_job(env: Mapping[str, str]) -> Path:
    """Return where the ranks of a program without a run directory report; the same on all of them."""
    if env.get("WORDRUN_LAUNCH_RECORD"):
        return stack_requests.folder_of(env["WORDRUN_LAUNCH_RECORD"])
    job = slurm.step_of(env, "-") or env.get("TORCHELASTIC_RUN_ID") or env.get("MASTER_PORT") or "job"
    return Path.cwd() / "failures" / job


def start_for_script(
    world: World, hang_s: float, timeout_s: float = math.inf, *, forced: bool = False
) -> Callable[[], None]:
    """Watch the collectives of a program that does not call ``mark``; return what ends that."""
    if Watch.opened or world.size == 1:
        return lambda: None
    return Watch(world, folder_of_job(os.environ), hang_s, timeout_s, waits=True, forced=forced).close


@contextlib.contextmanager
def starting(world: World | None) -> Iterator[None]:
    """Watch this rank in a ``with`` block before its trainer does. The limit is fixed: the config may be unknown."""
    if world is None or world.size == 1:
        yield
        return
    watching = Watch(world, folder_of_job(os.environ), START_S)
    with contextlib.closing(watching), watching.phase("start-up", SLOW):
        yield


def start_from_env() -> None:
    """Watch this process if it is a rank of ``launch --hang``, but not the processes that it starts."""
    world = discover()
    if world.size > 1:
        start_for_script(world, float(os.environ.pop("WORDRUN_HANG_S")), forced=True)
