"""``launch --prewarm``: what is read, in which order, and when."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from wordrun.launch import prewarm

if TYPE_CHECKING:
    from conftest import Command


def test_libraries_come_first_and_only_what_imports_read(tmp_path: Path) -> None:
    tag = sys.implementation.cache_tag
    for name, size in (
        (f"a/__pycache__/m.{tag}.pyc", 9), ("a/__pycache__/m.cpython-26.pyc", 9), ("a/m.py", 9), ("a/small.so", 1),
        ("b/libbig.so.12", 5), ("b/header.h", 9),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "broken.so").symlink_to("nowhere")
    found = prewarm.files([str(tmp_path)])
    names = [Path(path).relative_to(tmp_path).as_posix() for path in found]
    assert names == ["b/libbig.so.12", "a/small.so", "broken.so", f"a/__pycache__/m.{tag}.pyc"]
    assert [prewarm.read(path) for path in found] == [5, 1, 0, 9]


def test_the_commands_own_python_reads_before_the_ranks_start(command: Command, tmp_path: Path) -> None:
    (tmp_path / "python3.11").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3.11").chmod(0o755)
    done = command("launch", "--prewarm", "./python3.11", "train")
    assert (done.stdout.splitlines(), done.returncode) == ([prewarm.__file__, "train"], 0), done.stderr


def test_a_failed_prewarm_does_not_keep_the_command_from_running(command: Command, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"; test "$1" = train\n')
    (tmp_path / "python").chmod(0o755)
    done = command("launch", "--prewarm", "./python", "train")
    assert (done.stdout.splitlines()[-1], done.returncode) == ("train", 0)
    assert "--prewarm failed with status 1" in done.stderr
