"""Processes that work on pieces for one rank."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wordrun.config import DataConfig
from wordrun.data import piecework
from wordrun.data.documents import Piece
from wordrun.dist import World
from wordrun.errors import UserError


def number(data: DataConfig, world: World, tasks: int) -> int:
    """Return the number of processes in which this rank prepares; 0: in its own, as there is one piece in all."""
    if tasks == 1:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, data.workers or cores // world.local_size)


def work_on(task: str, data: DataConfig, folder: Path, mine: Sequence[Piece], count: int) -> Iterator[list[int]]:
    """Do ``task`` for the pieces ``mine`` in ``count`` processes; yield pieces, documents, tokens and bytes so far."""
    if not count:
        latest = [0, 0, 0]

        def tell(*counts: int) -> None:
            latest[:] = counts

        for piece in mine:
            piecework.run(task, piece, data, folder, tell)
            yield [1, *latest[:2], piece.size]
        return
    count = min(count, len(mine))
    todo: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    for piece in mine:
        todo.put(piece)
    news: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
    processes = [_start(task, data, folder) for _ in range(count)]
    for index, process in enumerate(processes):
        threading.Thread(target=_serve, args=(index, process, todo, news), daemon=True).start()
    now: dict[int, list[int]] = {index: [0, 0, 0] for index in range(count)}
    finished, total = 0, [0, 0, 0]
    try:
        while finished < len(mine):
            index, kind, value = news.get()
            if kind == "so far":
                size, counts = value
                now[index] = [*counts[:2], min(size, counts[2])]
            elif kind == "done":
                size, counts = value
                total = [a + b for a, b in zip(total, [*counts[:2], size], strict=True)]
                now[index] = [0, 0, 0]
                finished += 1
            else:
                raise UserError(str(value))
            yield [finished, *(sum(column) for column in zip(total, *now.values(), strict=True))]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()


def _start(task: str, data: DataConfig, folder: Path) -> subprocess.Popen[str]:
    # A worker is one thread: there are as many of them as cores.
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "wordrun.data.piecework"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdin is not None
    job = {"task": task, "data": asdict(data), "folder": str(folder)}
    process.stdin.write(json.dumps(job) + "\n")
    return process


def _serve(
    index: int, process: subprocess.Popen[str], todo: queue.SimpleQueue[Piece], news: queue.SimpleQueue[Any]
) -> None:
    """Give a worker one piece after the other, and pass on what it says."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while True:
            try:
                piece = todo.get_nowait()
            except queue.Empty:
                return
            process.stdin.write(json.dumps(asdict(piece)) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                ((kind, value),) = json.loads(line).items()
                news.put((index, kind, value if kind == "error" else (piece.size, value)))
                if kind == "done":
                    break
            else:
                raise OSError(f"it ended with status {process.wait()}")
    except (OSError, ValueError) as error:
        news.put((index, "error", f"a process that prepares shards has died: {error}. Run the same command again"))
