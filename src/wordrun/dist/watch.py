"""Notice that a rank makes no progress, and have all ranks say where they are.

Each rank has a thread that sleeps most of the time. It compares a counter, which the main thread advances, with what it
was: nothing is sent while all is well. When a rank is late, it leaves a request in a folder that all hosts share; every
rank's thread finds it, and adds a file with its stacks and the collectives that it waits for. The lowest rank that
answers groups them into one message (``wordrun.dist.hang``). A rank that cannot answer, since it was stopped or its
interpreter's lock is held, is described by another one on its host. Files, unlike the store, do not depend on rank 0.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wordrun import files, stack_requests
from wordrun.dist import hang, mpi_calls, stacks
from wordrun.dist.mesh import Layout
from wordrun.dist.world import World, discover
from wordrun.log import LOGGER

# Start-up, the first step (which compiles), samples and saves may take this many times as long as other steps.
SLOW = 5.0
# Ranks wait at most this long for each other's answers, or as long as a hang takes to be noticed.
ANSWER_S = 40.0
TICK_S = 1.0
# A rank that starts may take SLOW times as long, as in the trainer by default.
START_S = 120.0
# All ranks together look for requests this often, since they ask one metadata server.
LOOKS_PER_S = 500.0
ASKED_S = 10.0  # the same for an answer to a question, without a hang


class Watch:
    """Watches this process until ``close``.

    Args:
        world: this rank.
        folder: where requests, answers and reports go; the same for all ranks, and created when it is needed.
        hang_s: seconds without progress that count as a hang; 0: only answer questions.
        waits: returns for how many seconds the oldest collective has been waiting, for programs that do not call
            ``phase`` and ``mark``.
    """

    def __init__(self, world: World, folder: Path, hang_s: float, waits: Callable[[], float] = lambda: 0.0) -> None:
        self.world, self.folder, self.hang_s, self.waits = world, folder, hang_s or math.inf, waits
        self.step: int | None = None
        self.layout = Layout()  # until it is known
        self._count, self._phase, self._factor = 0, "", math.inf
        self._known = set[str]()  # phases that have been seen once
        self._name = f"wordrun-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        self._answered = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._dump = stacks.Dump(self._name, world.rank)
        self._thread.start()
        _active.append(self)

    def close(self) -> None:
        """Stop watching."""
        _active.remove(self)
        self._ended.set()
        if threading.current_thread() is not self._thread:  # in which a trainer may be garbage collected
            self._thread.join(TICK_S)
        if not self._thread.is_alive():  # otherwise it is about to say something
            self._dump.close()
        if _active:
            _active[-1]._dump.register()

    def mark(self, step: int | None = None, layout: Layout | None = None) -> None:
        """Do what the function ``mark`` describes."""
        self._count += 1
        self.layout = layout or self.layout
        if step is not None:
            if self.step is not None:
                self._known.add("training")
            self.step = step

    @contextlib.contextmanager
    def phase(self, name: str, factor: float = 1.0) -> Iterator[None]:
        """Do what the function ``phase`` describes."""
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
        return self.hang_s * max(self._factor, first)

    def ask(self, why: str) -> None:
        """Ask all ranks where they are, unless somebody has just done so; ``why``: hang or question."""
        starts = not is_joined() and not mpi_calls.CALLS.pending
        seconds = self.hang_s * (SLOW if starts else 1.0) if math.isinf(self.limit) else self.limit
        try:
            stack_requests.request(self.folder, why, seconds)
        except OSError as error:  # such as a full disk
            since = f"no progress for {seconds:g} s: " if why == "hang" else ""
            line = stacks.user_line(stacks.own())
            LOGGER.error("%sat %s; cannot ask other ranks: %s: %s", since, line, error.filename, error.strerror)

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # signals are for the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        tick = min(TICK_S, self.hang_s / 8)
        every = max(tick, self.world.size / LOOKS_PER_S)
        count, since, look_at, asked = -1, 0.0, 0.0, False
        while not self._ended.wait(tick):
            now = time.monotonic()
            if self._count != count:
                count, since, asked = self._count, now, False
            try:
                if self._dump.asked():
                    self.ask("question")
                    look_at = now
                late = now - since > self.limit or (_active[-1:] == [self] and self.waits() > self.hang_s)
                late = late and (now - since > SLOW * self.limit or not stacks.compiles())
                if late and not asked:
                    asked = True
                    self.ask("hang")
                    look_at = now
                if now >= look_at:
                    look_at = now + every
                    asked |= self._answer(now - since)
            except Exception as error:  # such as a folder that is gone; the run must not suffer
                LOGGER.warning("cannot say where the ranks are: %r", error)
                look_at = time.monotonic() + ANSWER_S

    def _answer(self, idle_s: float) -> bool:
        """Answer a request that is new, and report if this rank is the lowest; return whether it was about a hang."""
        asked = stack_requests.read(self.folder / stack_requests.REQUEST)
        if not asked or asked["id"] == self._answered:
            return False
        self._answered = asked["id"]
        answers = self.folder / asked["id"]
        try:
            files.replace(answers / f"{self.world.rank}.json", json.dumps(self._own_answer(idle_s)))
        except FileNotFoundError:  # the report is finished
            return True
        patience = min(ANSWER_S, max(self.hang_s, 2.0)) if asked["why"] == "hang" else ASKED_S
        self._wait(answers, patience)
        if answers.is_dir() and not any((answers / f"{rank}.json").exists() for rank in range(self.world.rank)):
            self._report(asked, answers)
        return bool(asked["why"] == "hang")

    def _wait(self, answers: Path, patience: float) -> None:
        """Wait until the report is finished or, on rank 0, everybody has answered; answer for others meanwhile."""
        begun, helped = time.monotonic(), False
        # Other ranks report only in place of rank 0.
        until = begun + patience * (1.0 if self.world.rank == 0 else 1.3)
        while time.monotonic() < until and answers.is_dir():
            if self.world.rank == 0 and len(list(answers.glob("*[0-9].json"))) == self.world.size:
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
            answer = hang.Answer(
                rank, self.world.host, pid, line=stacks.user_line(found) if found else "", spoken_for=True,
                stacks={name: list(each) for name, each in found.items()}, state=stacks.STATES.get(letter, ""),
            )  # fmt: skip
            with contextlib.suppress(FileNotFoundError):
                # By another name: this rank will not report.
                files.replace(answers / f"for-{rank}.json", json.dumps(vars(answer)))

    def _own_answer(self, idle_s: float) -> dict[str, Any]:
        found = stacks.own()
        groups, pending, last = _collectives(self.world.size)
        calls, call = mpi_calls.CALLS, stacks.torch_call(found)
        if calls.count:
            last[mpi_calls.GROUP] = calls.count
        if calls.pending:
            group, op, size = calls.pending
            call = call or op
            pending.append({"group": group, "seq": calls.count, "op": op, "size": size})
        return vars(
            hang.Answer(
                self.world.rank, self.world.host, os.getpid(), phase=self._phase, step=self.step, idle_s=idle_s,
                stacks={name: list(each) for name, each in found.items()}, line=stacks.user_line(found),
                call=call, groups=groups, pending=pending, last=last,
            )
        )  # fmt: skip

    def _report(self, asked: dict[str, Any], answers: Path) -> None:
        found = [hang.Answer(**each) for path in answers.glob("*[0-9].json") if (each := stack_requests.read(path))]
        found.sort(key=lambda answer: answer.rank)
        kind = "hang" if asked["why"] == "hang" else "stacks"
        name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
        taken = len(list(self.folder.glob(f"{name}*.txt")))
        path = self.folder / f"{name}{f'-{taken + 1}' if taken else ''}.txt"
        lead = f"no progress for {asked['seconds']:g} s" if kind == "hang" else "where the ranks are now"
        text = f"{lead}: {hang.describe(found, self.world, self.layout)}"
        files.replace(path, f"{text}\n\n{hang.all_stacks(found)}")
        stack_requests.withdraw(self.folder, asked["id"])
        log = LOGGER.error if kind == "hang" else LOGGER.warning
        log("%s. Stacks of all ranks: %s; more: docs/jobs.md#a-hang", text, os.path.relpath(path))


_active: list[Watch] = []
"""The watches of this process, the newest last: a notebook may have several trainers."""


def start(world: World, run_dir: str, hang_s: float) -> Watch:
    """Watch this rank of a run, with reports in ``failures`` of its directory; see ``Watch``."""
    return Watch(world, Path(run_dir).absolute() / "failures", _forced_s or hang_s)


def mark(step: int | None = None, layout: Layout | None = None) -> None:
    """Note that the main thread makes progress, is about to take ``step`` (from 0), or knows the ranks' ``layout``."""
    if _active:
        _active[-1].mark(step, layout)


@contextlib.contextmanager
def phase(name: str, factor: float = 1.0) -> Iterator[None]:
    """Name what the main thread does in a ``with`` block or function, where a hang takes ``factor`` times as long."""
    with _active[-1].phase(name, factor) if _active else contextlib.nullcontext():
        yield


def folder_of_job(env: Mapping[str, str]) -> Path:
    """Return where the ranks of a program without a run directory report; the same on all of them."""
    if env.get("WORDRUN_LAUNCH_RECORD"):
        return stack_requests.folder_of(env["WORDRUN_LAUNCH_RECORD"])
    step = "-".join(env[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in env)
    return Path.cwd() / "failures" / (step or env.get("TORCHELASTIC_RUN_ID") or env.get("MASTER_PORT") or "job")


def start_for_script(world: World, hang_s: float) -> Callable[[], None]:
    """Watch the collectives of a program that does not call ``mark``; return what ends that."""
    if _active or world.size == 1:
        return lambda: None
    return Watch(world, folder_of_job(os.environ), hang_s, Waits()).close


@contextlib.contextmanager
def starting(world: World | None) -> Iterator[None]:
    """Watch this rank in a ``with`` block before its trainer does; the config, which has the limit, may be unknown."""
    if world is None or world.size == 1:
        yield
        return
    watching = Watch(world, folder_of_job(os.environ), _forced_s or START_S)
    with contextlib.closing(watching), watching.phase("start-up", SLOW):
        yield


def start_from_env() -> None:
    """Watch this process if it is a rank of ``launch --hang``, but not the processes that it starts."""
    world = discover()
    if world.size > 1:
        global _forced_s
        _forced_s = float(os.environ.pop("WORDRUN_HANG_S"))
        mpi_calls.watch()
        start_for_script(world, _forced_s)


_forced_s = 0.0
"""The S of ``launch --hang``."""


def _collectives(size: int) -> tuple[dict[str, list[Sequence[int]]], list[dict[str, Any]], dict[str, int]]:
    """Return this rank's groups, its unfinished collectives and the number of its last one in each group."""
    if not is_joined():
        return {}, [], {}
    from wordrun import flight_recorder

    records = flight_recorder.flight_records()
    last: dict[str, int] = {}
    pending = []
    for record in records:
        last[record["group"]] = max(last.get(record["group"], 0), record["seq"])
        if record["pending"]:
            pending.append({name: record[name] for name in ("group", "seq", "op", "size")})
    members = flight_recorder.group_members()
    groups = {group: _spans(members[group], size) for group in last if group in members}
    return groups, pending[:20], last


def _spans(members: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return ``members`` as the first, last and distance of ranges, one as a rule; empty: all ranks."""
    if len(members) == size:
        return []
    distance = members[1] - members[0] if members[1:] else 1
    if [*range(members[0], members[-1] + 1, distance)] == list(members):
        return [(members[0], members[-1], distance)]
    return [(member, member, 1) for member in members]


def is_joined() -> bool:
    """Return whether this process has a torch process group, without importing torch."""
    return bool(getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)())


class Waits:
    """For how many seconds the process has been waiting for others, as far as torch and mpi4py know."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        """By group: how many collectives have begun and ended, and since when."""
        self._call: tuple[Any, float] = None, 0.0
        """The main thread's call of torch.distributed, such as recv, which torch does not count, and since when."""

    def __call__(self) -> float:
        """Return the longest time; 0: it is not waiting."""
        now, waited = time.monotonic(), mpi_calls.CALLS.waited()
        # As this keeps the frame, another call has another one.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or stacks.IN_TORCH not in frame.f_code.co_filename:
            self._call = None, now
        elif frame is not self._call[0]:
            self._call = frame, now
        in_call = now - self._call[1]
        if not is_joined():  # it starts, which may take longer
            return max(waited, in_call / SLOW)
        from wordrun import flight_recorder

        counts = flight_recorder.collective_counts()
        self._seen = {
            group: seen if (seen := self._seen.get(group)) and seen[0] == count else (count, now)
            for group, count in counts.items()
        }
        times = (now - since for (begun, ended), since in self._seen.values() if ended < begun)
        return max(waited, in_call, *times)
