"""Ranks forked from one process that has imported torch and the backends: a start costs nothing.

For tests of what ranks do together, whoever started them. Those of starting, stopping and meeting use real launchers.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from wordrun.launch.address import free_port

# What a rank imports sooner or later.
IMPORTS = shlex.split("""
    pytest torch._dynamo wordrun.commands.train wordrun.train.language wordrun.train.trainer
    wordrun.backend.ddp wordrun.backend.pipeline torch.distributed.checkpoint warm
""")
# Launchers end the other ranks this soon after one has failed.
GRACE_S = 0.3
_server = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


def preload(*more: str) -> None:
    """Let the process from which ranks are forked import ``more``, unless it has been started."""
    _server.set_forkserver_preload([*IMPORTS, *more])


preload()


def start(target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    """Call ``target`` in a fork of the process that has imported torch.

    Returns:
        the new process, whose end only the caller's thread may look at.
    """
    process = _server.Process(target=target, args=args, daemon=True)
    with _starting:
        process.start()
        # Otherwise another thread that starts a process would look at the end of this one, which can be read once.
        vars(multiprocessing.process)["_children"].discard(process)
    return process


def run(
    n: int, words: Sequence[str], env: Mapping[str, str], timeout: float, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python script, or ``-m module``, on ``n`` ranks; the status is that of the first rank to fail.

    Ranks that end at almost the same moment, one of them because of the other, may be seen together: then the lowest
    rank's status counts.

    Args:
        n: ranks.
        words: what comes after ``python``.
        env: of the ranks, but for what says who they are.
        timeout: seconds after which they are killed.
        folder: where they run; None: here.

    Raises:
        subprocess.TimeoutExpired: they had not ended by then.
    """
    folder = (folder or Path.cwd()).absolute()
    files = [folder / f"{name}-of-{n}-ranks.txt" for name in ("stdout", "stderr")]
    for file in files:
        file.write_text("")
    told = {"WORDRUN_LAUNCHER": "local", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(n):
        mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
        whole = {**env, **told, **{name: str(number) for name, number in mine.items()}}
        ranks.append(start(_rank, list(words), str(folder), whole, files))
    end, status = time.monotonic() + timeout, 0
    while (living := [rank for rank in ranks if rank.exitcode is None]) and time.monotonic() < end:
        wait([rank.sentinel for rank in living], timeout=end - time.monotonic())
        if not status and (status := next((rank.exitcode for rank in living if rank.exitcode), 0)):
            end = min(end, time.monotonic() + GRACE_S)
    late = [rank for rank in ranks if rank.exitcode is None]
    for rank in late:
        rank.kill()
    for rank in ranks:
        rank.join()
    output, errors = (file.read_text() for file in files)
    if late and not status:
        raise subprocess.TimeoutExpired(words, timeout, output, errors)
    return subprocess.CompletedProcess(words, status, output, errors)


@contextlib.contextmanager
def undrawn() -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Let runs draw no plots and no report: nobody looks at them, and in small runs they take longer than training.

    Yields:
        what makes a context in which they are drawn nevertheless.
    """
    from wordrun.train import run

    drawing = partial(mock.patch.multiple, run, page=run.page)
    with mock.patch.multiple(run, page=SimpleNamespace(write=lambda path, **_: [])):
        yield drawing


def drawn() -> AbstractContextManager[Any]:
    """Let runs be drawn, also if the process that was forked has imported sitecustomize from tests/undrawn."""
    from wordrun.train import run

    changed = vars(run).get("drawing_of_users")
    return mock.patch.multiple(run, **changed) if changed else contextlib.nullcontext()


def _rank(words: list[str], folder: str, env: dict[str, str], files: Sequence[Path]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    become(words, folder, env)


def become(words: Sequence[str], folder: str, env: Mapping[str, str]) -> None:
    """Run a Python script, or ``-m module``, in this process, which has been forked."""
    gc.freeze()  # a collection would copy all memory that the ranks share
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    script = Path(words[0]).absolute()
    sys.argv, sys.path[0] = list(words), folder if words[0] == "-m" else str(script.parent)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    with drawn() if env.get("DRAWN_BY_TESTS") else undrawn():
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")


def without_gloo(output: str) -> str:
    """Return ``output`` without what gloo of torch 2.8 prints when ranks connect, in fragments that may interleave."""
    if "[Gloo]" not in output:
        return output
    fragments = r"\[Gloo\] Rank \d*|\d*( is connected to| peer ranks\.| ?Expected number of [\w ]+ :) ?\d*"
    return re.sub(r"^\d* *\n", "", re.sub(fragments, "", output), flags=re.MULTILINE)
