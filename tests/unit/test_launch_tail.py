"""Which of the lines on stderr are a failed rank's."""

from __future__ import annotations

import pytest

from wordrun.launch.output_tail import LAST_LINES, TAIL_BYTES, Tail, lines_of

WORDRUN = """\
[rank 1] failed on host n2
Traceback (most recent call last):
ValueError: boom
[rank 0] lost contact with rank 1"""
TORCH = """\
some warning
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]: ValueError: boom
[rank0]: RuntimeError: Connection closed by peer"""
PLAIN = """\
srun: error: n2: task 1: Exited with exit code 3
Traceback (most recent call last):
ValueError: boom
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED ***
Terminated"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WORDRUN, ["[rank 1] failed on host n2", "Traceback (most recent call last):", "ValueError: boom"]),
        (TORCH, ["[rank1]: Traceback (most recent call last):", "[rank1]: ValueError: boom"]),
        (PLAIN, ["Traceback (most recent call last):", "ValueError: boom"]),
        ("[rank0]: a warning of another rank", []),
        ("", []),
    ],
    ids=["wordrun", "torch", "plain", "another's", "nothing"],
)
def test_lines_of_a_rank(text: str, expected: list[str]) -> None:
    assert lines_of(1, text.splitlines()) == expected


def test_only_the_last_lines_count() -> None:
    lines = [str(i) for i in range(LAST_LINES + 5)]
    assert lines_of(0, lines) == lines[5:]


def test_a_tail_is_short_and_shows_the_last_state_of_a_progress_bar() -> None:
    tail = Tail()
    tail.add(b"x" * TAIL_BYTES)
    tail.add(b"\n 10%\r 50%\r100%\n\nend \xff")
    lines = tail.lines()
    assert lines[1:] == ["100%", "end \ufffd"]
    assert len(lines[0]) < TAIL_BYTES
