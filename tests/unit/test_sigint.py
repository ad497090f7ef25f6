"""Ctrl-C before there is anything to save."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Start


IN_C = """
import ctypes, sys
from wordrun.common.sigint import end_at_once
end_at_once()
print("ready", flush=True)
ctypes.PyDLL(None).sleep(1) if "held" in sys.argv else ctypes.CDLL(None).sleep(60)
ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.parametrize("lock", ["held", "released"])
@pytest.mark.parametrize(("rank", "says"), [("", "interrupted; nothing to save\n"), ("1", "")])
def test_ctrl_c_is_heard_in_the_midst_of_c_code(lock: str, rank: str, says: str, start: Start) -> None:
    """As in an import, or while a tokenizer is trained; the code may hold the interpreter's lock for a moment."""
    env = {**os.environ, **({"RANK": rank} if rank else {})}
    job = start(sys.executable, "-c", IN_C, lock, env=env)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=50) == ("", says)  # the code would take a minute
    assert job.returncode == 130


def test_ctrl_c_while_a_tokenizer_is_trained(start: Start, tmp_path: Path) -> None:
    lines = (f"{number * 7919 % 104729} word{number % 9973} thing{number * 31 % 7817}\n" for number in range(400_000))
    (tmp_path / "text.txt").write_text("".join(lines))
    job = start("wordrun", "prepare", "data=text", "data.path=text.txt", "tokenizer=bpe", cwd=tmp_path)
    assert job.stdout is not None
    assert any("building tokenizer=bpe" in line for line in job.stdout)
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=90) == (
        "",
        "interrupted: run the same command again to continue preparing the data\n",
    )
    assert job.returncode == 130
    assert not list(Path(os.environ["WORDRUN_DATA_HOME"]).rglob("*.lock"))


TAKEN = """
import os, signal, time
from wordrun.common import sigint
sigint.end_at_once()
ours = signal.getsignal(signal.SIGINT)

def record(number, frame):
    sigint.taken(ours)
    signal.signal(signal.SIGINT, ours)  # at once, so that a second one ends the process

for _ in range(50):
    signal.signal(signal.SIGINT, record)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
print("alive")
"""


def test_a_handler_that_restores_ours_does_not_end_the_process(start: Start) -> None:
    """As training does, which saves a checkpoint after the first Ctrl-C; the watching thread sees it a moment later."""
    job = start(sys.executable, "-c", TAKEN)
    assert job.communicate(timeout=90) == ("alive\n", "")


ENDED = """
import signal, threading, time
from wordrun.common import sigint
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script
for _ in range(20):
    with sigint.ending_at_once():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
while threading.active_count() > 1:
    time.sleep(0.01)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("python's own")
"""


def test_after_the_block_nothing_is_left(start: Start) -> None:
    job = start(sys.executable, "-c", ENDED)
    assert job.communicate(timeout=60) == ("python's own\n", "")


AGAIN = """
import signal, time
from wordrun.common import sigint
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script
sigint.end_at_once()
cleaned = 0
for _ in range(100):
    try:
        with sigint.raising():
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        cleaned += 1
    time.sleep(0.001)
print(cleaned)
"""


def test_what_cleans_up_after_ctrl_c_is_not_ended_by_it(start: Start) -> None:
    """The thread that watches may see the signal only once the block has ended."""
    job = start(sys.executable, "-c", AGAIN)
    assert job.communicate(timeout=60) == ("100\n", "")
    assert job.returncode == 0
