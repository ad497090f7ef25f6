"""The worker processes of one rank.

They are spawned, because forking a process that uses MPI or threads is unsafe.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from wordrun.common import cgroup, exit_reports
from wordrun.common.errors import UserError
from wordrun.config.registry import part_of
from wordrun.data.options import TextConfig
from wordrun.data.prepare import tokenize
from wordrun.data.prepare.sources.base import Source, WorkItem
from wordrun.dist import World

REPORT_S = 0.2
"""Seconds between progress reports."""
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""One thread per worker: there is one worker per core."""

COLUMNS = 5
"""Columns of the progress table, which has a row per work item: begun, done, documents, tokens and bytes."""

_preparing = threading.Lock()
"""Held while the environment and ``__main__`` are as workers need them: ranks may be threads of one process."""

_progress: Any = None
"""In a worker: the progress table, shared with the parent process."""


def number(data: TextConfig, world: World, items: int) -> int:
    """Return the number of worker processes for this rank; 0 for a single item, which needs none."""
    if items == 1:
        return 0
    return max(1, data.workers or cgroup.own_cores() // world.local_size)


def work_on(task: str, source: Source, folder: Path, items: Sequence[WorkItem], processes: int) -> Iterator[list[int]]:
    """Do ``task`` for ``items`` in ``processes`` processes.

    Yields:
        Work items, documents, tokens and bytes so far.

    Raises:
        UserError: if a work item failed or a worker died.
    """
    if not items:
        return
    if not processes:
        progress = np.zeros((len(items), COLUMNS), dtype=np.int64)
        for row, item in zip(progress, items, strict=True):
            with _blamed(source):
                _process(row, task, item, source, folder)
            yield progress[:, 1:].sum(axis=0).tolist()
        return
    context = _Context()
    shared = context.RawArray("q", COLUMNS * len(items))
    progress = np.frombuffer(shared, dtype=np.int64).reshape(-1, COLUMNS)
    pool = ProcessPoolExecutor(min(processes, len(items)), context, _begin, (shared,))
    try:
        with _as_worker_environment():
            waiting = {pool.submit(_work, index, task, item, source, folder) for index, item in enumerate(items)}
        while waiting:
            done, waiting = wait(waiting, REPORT_S, FIRST_COMPLETED)
            for future in done:
                with _blamed(source):
                    future.result()
            yield progress[:, 1:].sum(axis=0).tolist()
    except BrokenExecutor:
        begun = [item for item, row in zip(items, progress, strict=True) if row[0] and not row[1]]
        raise UserError(
            f"a worker process died (perhaps it ran out of memory) while preparing {_names(begun)}. Run the same "
            "command again to continue; with a smaller data.workers it needs less memory"
        ) from None
    finally:
        for process in filter(SpawnProcess.is_alive, context.processes):  # kill() fails on one that has not started
            process.kill()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _blamed(source: Source) -> Iterator[None]:
    """Turn an exception in the code of a source from outside wordrun, also in a worker, into one that names the part.

    Raises:
        PartError: it has raised one.
    """
    try:
        with exit_reports.without_exit():
            yield
    except Exception as error:
        part = part_of("data", source.data)
        if isinstance(error, UserError) or not part.origin:
            raise
        trace = "".join(traceback.format_exception(error))  # with the worker's traceback
        lines = re.findall(rf'File "{re.escape(inspect.getfile(part.load()))}", line (\d+)', trace)
        if not lines:
            raise
        raise part.failed(error, f" in line {lines[-1]}") from error


class _Context(SpawnContext):
    """Tracks the processes it starts: before Python 3.14 the executor cannot kill them."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        """Return a process that has not started yet."""
        self.processes.append(SpawnProcess(*args, **options))
        return self.processes[-1]


def _names(items: Sequence[WorkItem]) -> str:
    return " or ".join(f"{item.path or item.kind} (work item {item.number})" for item in items) or "shards"


@contextlib.contextmanager
def _as_worker_environment() -> Iterator[None]:
    """Set the environment that workers inherit, and hide ``__main__`` from them.

    Spawned processes import the caller's script, which may lack an ``if __name__ == "__main__"`` guard.
    """
    with _preparing:
        main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in ENVIRONMENT}
        sys.modules["__main__"] = types.ModuleType("__main__")
        os.environ.update(ENVIRONMENT)
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _begin(shared: Any) -> None:
    """Initialize a worker: ignore Ctrl-C, which the parent handles, and exit with the parent."""
    global _progress
    _progress = np.frombuffer(shared, dtype=np.int64).reshape(-1, COLUMNS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(index: int, task: str, item: WorkItem, source: Source, folder: Path) -> None:
    _process(_progress[index], task, item, source, folder)


def _process(row: Any, task: str, item: WorkItem, source: Source, folder: Path) -> None:
    """Process ``item`` and update its progress in ``row``."""

    def report(documents: int, tokens: int, characters: int) -> None:
        row[2:] = documents, tokens, min(item.size, characters)

    row[0] = 1
    tokenize.process(task, item, source, folder, report)
    row[1], row[4] = 1, item.size
