"""Tests of real processes are run once more if they fail, and the summary says so (tests/conftest.py)."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Command

TESTS = """
import pathlib
import time
import pytest

def test_that_passes_at_its_second_attempt():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    if not mark.exists():
        mark.touch()
        print("what it printed")
        raise OSError("\\n".join(f"line {n}" for n in range(200)) + "\\nthe first reason")

def test_that_never_passes():
    assert not "the other reason"
"""
HANGS = """
@pytest.mark.timeout(1)
def test_that_hangs():
    time.sleep(100)
"""


def test_only_tests_of_processes_are_tried_twice_and_each_is_listed(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for file in Path(__file__).parents[1].glob("*.py"):
        shutil.copy(file, tmp_path / "tests")
    for tier, text in (("unit", TESTS), ("dist", TESTS + HANGS)):
        (tmp_path / "tests" / tier).mkdir()
        (tmp_path / "tests" / tier / f"test_{tier}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nnorecursedirs =\nmarkers =\n  unit:\n  dist:\n")
    done = command(sys.executable, "-m", "pytest", "-rf", CI="")
    assert done.returncode == 1, done.stdout + done.stderr
    _, listed = done.stdout.split("tests that failed at their first attempt")
    listed, summary = listed.split("= tiers =")
    where = r"test_dist\.py::test_that_passes_at_its_second_attempt \(call\)\n\S+/test_dist\.py:11: OSError\nE "
    assert re.search(where, listed), listed
    assert "OSError: line 0\n" in listed
    assert "\n... (141 lines)\n" in listed
    assert "\nE           the first reason\nCaptured stdout call:\nwhat it printed\n" in listed
    assert "Timeout (>1.0s) from pytest-timeout" in listed
    assert "test_unit.py" not in listed
    assert "FAILED tests/unit/test_unit.py::test_that_passes_at_its_second_attempt" in summary
    assert "FAILED tests/dist/test_dist.py::test_that_never_passes" in summary
    assert "4 failed, 1 passed, 3 rerun in" in summary
