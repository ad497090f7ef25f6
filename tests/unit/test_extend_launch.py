"""The page that adds a launcher and a scheduler: applied to a copy of wordrun as it says, ``launch`` works in Flux."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extend_launch.md").read_text()
FILES = [
    (f"src/wordrun/launch/{kind}/flux.py", (ROOT / f"examples/flux/{kind}/flux.py").read_text())
    for kind in ("launchers", "schedulers")
]
# The last path that is named before each block.
ON_PAGE = re.findall(r"`(src/[\w/.]+)`(?:(?!`src/)(?!```).)*```\w+\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = [FILES[0], *ON_PAGE[:3], FILES[1], *ON_PAGE[3:]]
# What stands after an addition, for files that exist.
BEFORE = {
    "launchers/__init__.py": ("from wordrun.launch.launchers.hydra", "Hydra, OpenMPI"),
    "schedulers/__init__.py": ("from wordrun.launch.schedulers.base", "PBS(), Slurm()"),
    "launch/rank_env.sh": ("  *)\n",),
    "dist/world.py": (")\nTRACED = ",),
}
FLUX = """#!/bin/sh
case "$*" in
  "getattr hostlist") echo "n[1-2]" ;;
  "getattr jobid") echo "f23" ;;
  pgrep*) echo "$*" >> calls; echo "f7" ;;
  *) echo "$*" >> calls ;;
esac
"""


def insert(file: Path, before: str, text: str) -> None:
    """Put ``text`` into ``file``, before its only ``before``."""
    content = file.read_text()
    assert content.count(before) == 1, before
    file.write_text(content.replace(before, text + before))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Flux instance, with a copy of wordrun that is changed as the page says."""
    shutil.copytree(ROOT / "src" / "wordrun", tmp_path / "copy" / "wordrun")
    for name, text in BLOCKS:
        file = tmp_path / "copy" / name.removeprefix("src/")
        anchors = next((anchors for end, anchors in BEFORE.items() if name.endswith(end)), ())
        if len(anchors) == 2:
            imported, entry = text.splitlines(keepends=True)
            insert(file, anchors[0], imported)
            insert(file, anchors[1], f"{entry.strip()} ")
        elif anchors:
            insert(file, anchors[0], text)
        else:
            assert not file.exists()
            file.write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flux").write_text(FLUX)
    (tmp_path / "bin" / "flux").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(tmp_path / "copy"), "PATH": path, "FLUX_URI": "local:///run/flux/local"}


def python(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)


def test_the_page_adds_six_parts() -> None:
    assert [name.removeprefix("src/wordrun/") for name, _ in BLOCKS] == shlex.split("""
        launch/launchers/flux.py launch/launchers/__init__.py launch/rank_env.sh dist/world.py
        launch/schedulers/flux.py launch/schedulers/__init__.py
    """)
    assert sum(text.count("\n") for _, text in BLOCKS[:4]) <= 65


def test_launch_starts_ranks_by_flux(env: dict[str, str], tmp_path: Path) -> None:
    launch = ("-m", "wordrun.launch", "--dry-run", "--launcher", "flux")
    rank = f"/bin/sh {tmp_path}/copy/wordrun/launch/rank_env.sh python x.py"
    done = python(env, *launch, "--ppn", "1", sys.executable)
    assert done.returncode == 0, done.stderr
    assert "# scheduler: flux f23 (FLUX_URI)\n# hosts: n1 n2 (flux getattr hostlist)\n" in done.stdout
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    begin = f"{tmp_path}/bin/flux run -u -N 2 -n 2 --cores-per-task={cores} -o gpu-affinity=off --job-name=wordrun-"
    assert done.stdout.splitlines()[-1].startswith(begin)
    part = python(env, *launch[:3], "-N", "1", "python", "x.py").stdout.splitlines()[-1]  # it is the default there
    assert " -N 1 -n 1 " in part
    assert " --requires=hosts:n1 --job-name=wordrun-" in part
    assert part.endswith(rank)


def test_options_messages_and_site_files_know_it(env: dict[str, str], tmp_path: Path) -> None:
    assert "flux" in python(env, "-m", "wordrun.launch", "--help", "all").stdout
    outside = {name: value for name, value in env.items() if name != "FLUX_URI"}
    done = python(outside, "-m", "wordrun.launch", "--launcher", "flux", "true")
    assert (done.returncode, done.stderr.startswith("launch: --launcher flux: needs flux in PATH and FLUX_URI")) == (
        2,
        True,
    )
    (tmp_path / "mine.yaml").write_text("scheduler: pbs\nlauncher: flux\n")
    wrong = python(env, "-m", "wordrun.launch", "--info", "--site", str(tmp_path / "mine.yaml"))
    assert "launcher: flux needs scheduler: flux" in wrong.stderr
    inside = python({**env, "FLUX_TASK_RANK": "3"}, "-m", "wordrun.launch", "true")
    assert "already rank 3 of a Flux job" in inside.stderr


def test_its_ranks_know_who_they_are_and_get_signals(env: dict[str, str], tmp_path: Path) -> None:
    task = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
    code = "from wordrun.dist.world import discover; print(discover())"
    rank = [str(tmp_path / "copy/wordrun/launch/rank_env.sh"), sys.executable, "-c", code]
    told = {**env, **task, "WORDRUN_LAUNCHER": "flux", "WORDRUN_WORLD_SIZE": "8", "WORDRUN_LAUNCH_ID": "1-aa"}
    done = subprocess.run(["sh", *rank], env=told, capture_output=True, text=True)
    assert done.stdout.endswith(" [rank 5 of 8] [local rank 1 of 4] [node 1 of 2]\n"), done.stderr
    code = (
        "from wordrun.launch.launchers import LAUNCHERS; import sys; LAUNCHERS['flux']('flux').send(15, 0, None, 'w-1')"
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=tmp_path)
    assert (tmp_path / "calls").read_text().splitlines() == ["pgrep ^w-1$", "job kill -s SIGTERM f7"]
