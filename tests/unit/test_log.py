"""What a person sees of a log: on a terminal and in a file."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import re
import socket
import struct
import termios
from pathlib import Path

import pytest
from rich.console import Console

from wordrun.common import log

STYLE = re.compile(r"\x1b\[[\d;]*m")
LONG = "  wordrun generate run=outputs/shakespeare/nano-DDP/20261122-161615-ed28 prompt='a 1,234 b' length=200"


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Log an information, a warning and an error; return the lines on the screen."""
    handle = log.start(0)
    log.LOGGER.info("to paste:\n%s", LONG)
    log.LOGGER.warning("look [out]")
    log.LOGGER.error("it failed")
    handle.close()
    return capsys.readouterr().out.splitlines()


def test_a_terminal_shows_whole_lines_with_few_styles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORDRUN_TERMINAL", "40x20")
    info, command, warning, error = shown(capsys)
    assert re.fullmatch(r"\x1b\[2m\[\d\d:\d\d:\d\d\] \x1b\[0mto paste:", info)
    assert command == LONG
    assert warning.endswith("\x1b[33mWARNING \x1b[0mlook [out]")
    assert error.endswith("\x1b[1;31mERROR \x1b[0mit failed")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("\x1b[3" in line for line in shown(capsys))


def resize(terminal: int, lines: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def test_a_rank_sees_that_the_terminal_of_launch_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    try:
        resize(theirs, 24, 70)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("WORDRUN_TERMINAL", f"100x30@{socket.gethostname()}:{os.ttyname(theirs)}")
        screen = log.console()
        assert (screen.width, screen.height) == (70, 24)
        resize(theirs, 50, 200)
        assert (screen.width, screen.height) == (200, 50)
        resize(theirs, 0, 0)
        assert (screen.width, screen.height) == (100, 30)
        monkeypatch.setenv("WORDRUN_TERMINAL", f"100x30@another:{os.ttyname(theirs)}")
        assert log.console().width == 100
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_file_shows_plain_lines_with_their_level(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys)
    assert not any(STYLE.search(line) for line in lines)
    assert lines.pop(1) == LONG
    assert [line.split("] ", 1)[1] for line in lines] == ["INFO to paste:", "WARNING look [out]", "ERROR it failed"]


def test_records_from_before_the_file_are_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = log.start(0)
    log.LOGGER.info("early")
    handle.add_file(tmp_path / "log.txt")
    log.LOGGER.info("late")
    handle.close()
    text = (tmp_path / "log.txt").read_text()
    assert [line.split()[-1] for line in text.splitlines()] == ["early", "late"]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_prose_is_wrapped_between_words_and_a_path_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORDRUN_TERMINAL", "40x20")
    monkeypatch.setenv("TERM", "xterm-256color")
    path = "outputs/shakespeare/nano-DDP/20261122-161615-ed28/plots/loss.png"
    handle = log.start(0)
    log.LOGGER.info("these words fill more than one line: %s", path)
    handle.close()
    lines = STYLE.sub("", capsys.readouterr().out).splitlines()
    assert [line.strip() for line in lines][1:] == ["one line:", path]


def test_a_terminal_that_cannot_show_a_character_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    handler = log.ScreenHandler(Console(file=terminal, force_terminal=True, width=80))
    record = log.LOGGER.makeRecord("wordrun", 20, "", 0, "sample:\nünï", (), None)
    handler.handle(record)
    assert "UnicodeEncodeError" in capsys.readouterr().err


def test_a_reader_that_leaves_costs_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w", buffering=1) as stream:
        handler = log.PipeHandler(stream)
        os.close(reads)
        for message in ("one", "two"):
            handler.handle(logging.makeLogRecord({"msg": message}))
    assert capfd.readouterr() == ("", "")


def test_a_pseudo_terminal_that_a_launcher_gives_to_ranks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert log.console().is_terminal
    monkeypatch.setenv("WORDRUN_PTY", "1")
    console = log.console()
    assert (console.is_terminal, console.width) == (False, 200)
