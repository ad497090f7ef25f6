"""A rank that fails ends the whole job, and one rank says why: ``guard``, ``abort``.

docs/design.md, "A failure on a rank", has the layers below and above.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

from wordrun.common.errors import OtherRankError, UserError, WorldError, with_page
from wordrun.dist import mpi
from wordrun.dist.rendezvous import opened_store
from wordrun.dist.world import World

# The first rank to fail ends this long after its message. By then, mpiexec has read it, and rank 0, if it fails for the
# same reason, has recorded why the run ended.
LAST_WAIT_S = 0.5
# A rank that fails because another one did waits this long for the launcher to end it, then exits.
SECONDARY_WAIT_S = 5.0
# If it is not known which rank failed first, the others wait this long for rank 0's message, and for their end.
UNKNOWN_WAIT_S = 1.0
# The same under guardians: launch first lets the ranks end by themselves for a while.
UNKNOWN_FORKED_WAIT_S = 7.0
# If a rank was killed, its guardian ends the others within this time, so what they raise is not shown.
GUARDIAN_WAIT_S = 1.0
# Rank 0, which hosts the store, answers within this time.
STORE_TIMEOUT = timedelta(seconds=5)
# Disk errors, for which a traceback would not help.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextlib.contextmanager
def guard(world: World) -> Iterator[None]:
    """End the entire job when this rank raises, and print its traceback once.

    A ``UserError`` prints only its message and ends the job with its exit status. ``sys.exit`` works as in any program.
    Any other exception prints a traceback, the rank and its host, and ends the job with status 1. Ranks that fail as a
    consequence print nothing.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, str):  # which Python would print
            _report(world, error.code)
            _end(world, 1)
        if error.code not in (None, 0):
            abort(world, error.code if isinstance(error.code, int) else 1)
        raise
    except KeyboardInterrupt:
        abort(world, 130)
    except UserError as error:
        _report(world, with_page(error), is_cause=not isinstance(error, OtherRankError))
        _end(world, error.exit_status)
    except Exception as error:
        message = f"failed on host {world.host}\n{traceback.format_exc().rstrip()}"
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            what = f"cannot write to {error.filename or 'the run directory'} on {world.host}: {error.strerror}"
            message = (
                f"{what}. What was written before is intact.\nmore: docs/checkpoints.md#when-checkpoints-are-written"
            )
        _report(world, message)
        _end(world, 1)


def abort(world: World, status: int) -> None:
    """End this process and the entire job with ``status``, after everything that it has printed has arrived."""
    sys.stdout.flush()
    sys.stderr.flush()
    if world.size > 1:
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0
            _is_first()  # so that the others, which fail as a consequence, print nothing
        time.sleep(LAST_WAIT_S)
    _end(world, status)


def _is_first() -> bool | None:
    """Return whether this rank is the first to fail; None: this early, it is not known.

    Raises:
        RuntimeError: rank 0, which hosts the store, has died silently, or launch is about to end this rank.
    """
    store = opened_store()
    if store is None:
        return None
    store.set_timeout(STORE_TIMEOUT)
    return bool(store.add("wordrun/failures", 1) == 1)


def _end(world: World, status: int) -> None:
    sys.stdout.flush()
    if world.size == 1:
        sys.exit(status)
    # launch ends the other ranks when it learns of this one's status. mpiexec alone would return another status, and
    # srun would let the others wait. On abort, mpiexec exits at once and drops output that it has not read.
    if mpi.in_use(world) and "WORDRUN_STATUS_DIR" not in os.environ:
        with contextlib.suppress(WorldError):  # without an MPI library: the launcher ends the ranks when one has failed
            mpi.communicator().Abort(status)
    # Not sys.exit: destroying a process group after a failed collective can hang.
    os._exit(status)


class _Turn(NamedTuple):
    """What a failed rank does, so that only one rank's message is shown."""

    message: str
    """It prints this; empty: nothing."""
    wait_s: float
    """It waits this long. Whoever ends the job may end this rank meanwhile."""
    prints_first: bool = False
    """Whether it prints before it waits."""


def _report(world: World, message: str, *, is_cause: bool = True) -> None:
    """Print ``message`` unless another rank has failed before this one, or (``is_cause`` is False) says the same.

    A failure waits here and nowhere else.
    """
    if world.size == 1:
        print(message, file=sys.stderr, flush=True)
        return
    turn = _turn(world, message) if is_cause else _Turn("", SECONDARY_WAIT_S)
    if turn.prints_first:
        _print(turn.message, world)
    time.sleep(turn.wait_s)
    if not turn.prints_first:
        _print(turn.message, world)


def _print(message: str, world: World) -> None:
    if message:  # in one write, so that other ranks' output cannot split it
        sys.stderr.write(f"[rank {world.rank}] {message}\n")
        sys.stderr.flush()


def _turn(world: World, message: str) -> _Turn:
    forked = "WORDRUN_GENERATION" in os.environ
    first = _Turn(message, GUARDIAN_WAIT_S) if forked else _Turn(message, LAST_WAIT_S, prints_first=True)
    unknown_s = UNKNOWN_FORKED_WAIT_S if forked else UNKNOWN_WAIT_S
    try:
        is_first = _is_first()
    except RuntimeError:
        cause = message.partition("\nmore: ")[0].splitlines()[-1]
        return _Turn(f"lost contact with rank 0: {cause}\nmore: docs/jobs.md#what-happens-when", unknown_s)
    if is_first is None:  # all ranks usually fail alike
        return _Turn(message, unknown_s) if world.rank else first
    return first if is_first else _Turn("", SECONDARY_WAIT_S)
