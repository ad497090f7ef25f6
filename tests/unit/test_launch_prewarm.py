"""``launch --prewarm``: what is read, in which order, and when."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun.launch import prewarm

if TYPE_CHECKING:
    from conftest import Command


def test_libraries_come_first_and_only_what_imports_read(tmp_path: Path) -> None:
    tag = sys.implementation.cache_tag
    for name, size in (
        (f"a/__pycache__/m.{tag}.pyc", 9), ("a/__pycache__/m.cpython-26.pyc", 9), ("a/m.py", 9), ("a/small.so", 1),
        ("b/libbig.so.12", 5), ("b/header.h", 9), ("lib/site-packages/other.so", 9),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "broken.so").symlink_to("nowhere")
    found = prewarm.files([str(tmp_path)])
    names = [Path(path).relative_to(tmp_path).as_posix() for path in found]
    assert names == ["b/libbig.so.12", "a/small.so", "broken.so", f"a/__pycache__/m.{tag}.pyc"]
    assert [prewarm.read(path) for path in found] == [5, 1, 0, 9]


def test_compiled_modules_are_copied_once_to_where_python_looks_for_them(tmp_path: Path) -> None:
    source, cache = tmp_path / "m.py", tmp_path / "cache"
    source.write_text("print(__cached__)")
    compiled = Path(py_compile.compile(str(source)) or "")
    assert prewarm.read(str(compiled), str(cache)) == compiled.stat().st_size
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    done = subprocess.run([sys.executable, "-c", "import m"], cwd=tmp_path, env=env, capture_output=True, text=True)
    copy = Path(done.stdout.strip())
    assert copy.is_relative_to(cache)
    assert copy.read_bytes() == compiled.read_bytes()
    before = copy.stat().st_ino
    prewarm.read(str(compiled), str(cache))
    assert copy.stat().st_ino == before
    copy.write_bytes(b"part")
    prewarm.read(str(compiled), str(cache))
    assert copy.read_bytes() == compiled.read_bytes()


def test_no_cache_is_used_to_which_others_can_write(tmp_path: Path) -> None:
    prewarm.use_cache(str(tmp_path / "own"))
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    prewarm.use_cache(str(tmp_path / "own"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to("own")
    for name in ("shared", "link"):
        with pytest.raises(PermissionError, match=name):
            prewarm.use_cache(str(tmp_path / name))


@pytest.mark.parametrize(
    ("given", "words", "used"),
    [({}, "-I {file} {tmp}/wordrun-pycache-{uid}", "{tmp}/wordrun-pycache-{uid}"),
     ({"PYTHONPYCACHEPREFIX": "/mine"}, "-I {file}", "/mine")],
)  # fmt: skip
def test_ranks_find_the_copies(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], words: str, used: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@" $PYTHONPYCACHEPREFIX\n')
    (tmp_path / "python3").chmod(0o755)
    done = command("launch", "--prewarm", "./python3", "train")
    facts = {"file": prewarm.__file__, "tmp": tmp_path, "uid": os.getuid()}
    first = f"{words} {given.get('PYTHONPYCACHEPREFIX', '')}".strip()
    assert done.stdout.splitlines() == [first.format(**facts), f"train {used}".format(**facts)], done.stderr


def test_the_commands_own_python_reads_before_the_ranks_start(command: Command, tmp_path: Path) -> None:
    (tmp_path / "python3.11").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3.11").chmod(0o755)
    done = command("launch", "--prewarm", "./python3.11", "train")
    first, second = done.stdout.splitlines()
    assert (first.split()[:2], second, done.returncode) == (["-I", prewarm.__file__], "train", 0), done.stderr


def test_a_failed_prewarm_does_not_keep_the_command_from_running(command: Command, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" $PYTHONPYCACHEPREFIX; test "$1" = train\n')
    (tmp_path / "python").chmod(0o755)
    done = command("launch", "--prewarm", "./python", "train")
    assert (done.stdout.splitlines()[-1], done.returncode) == ("train", 0)
    assert "--prewarm failed with status 1" in done.stderr
