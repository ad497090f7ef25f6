"""What a person sees of a log: on a terminal and in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wordrun import log

STYLE = re.compile(r"\x1b\[[\d;]*m")
LONG = "paste: wordrun generate run=outputs/shakespeare/nano-DDP/20261122-161615-ed28 prompt='a 1,234 b' length=200"


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Log an information, a warning and an error; return the lines on the screen."""
    handle = log.start(0)
    log.LOGGER.info(LONG)
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
    info, warning, error = shown(capsys)
    assert re.fullmatch(r"\x1b\[2m\[\d\d:\d\d:\d\d\] \x1b\[0m" + re.escape(LONG), info)
    assert warning.endswith("\x1b[33mWARNING \x1b[0mlook [out]")
    assert error.endswith("\x1b[1;31mERROR \x1b[0mit failed")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("\x1b[3" in line for line in shown(capsys))


def test_a_file_shows_plain_lines_with_their_level(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys)
    assert not any(STYLE.search(line) for line in lines)
    assert [line.split("] ", 1)[1] for line in lines] == [f"INFO {LONG}", "WARNING look [out]", "ERROR it failed"]


def test_records_from_before_the_file_are_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = log.start(0)
    log.LOGGER.info("early")
    handle.add_file(tmp_path / "log.txt")
    log.LOGGER.info("late")
    handle.close()
    text = (tmp_path / "log.txt").read_text()
    assert [line.split()[-1] for line in text.splitlines()] == ["early", "late"]
    assert len(capsys.readouterr().out.splitlines()) == 2
