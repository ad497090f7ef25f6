"""The wheel and the sdist: complete, and working in an environment and a folder without the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from wordrun.track.metrics_jsonl import read_lines as read

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

if TYPE_CHECKING:
    from conftest import Command

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_list_of_packages_is_that_of_the_folders() -> None:
    found = {
        ".".join(("wordrun", *init.parent.relative_to(ROOT / "src" / "wordrun").parts))
        for init in (ROOT / "src" / "wordrun").rglob("__init__.py")
    }
    plugins = {"hydra_plugins", "hydra_plugins.wordrun_sweep"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | plugins | {"wordrun.conf"}
    assert not (ROOT / "src" / "hydra_plugins" / "__init__.py").exists(), "other packages share this namespace"


def test_every_folder_with_python_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "src" / "wordrun").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would commit, without git: an archive of the repository."""
    folder = tmp_path_factory.mktemp("source")
    list_files = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    parts = ["pyproject.toml", "README.md", "LICENSE", "src", "conf", "man"]
    for name in subprocess.run([*list_files, *parts], capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.glob("wordrun-*.tar.gz"))) == 1
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_everything_but_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"wordrun/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {f"wordrun/{path.relative_to(ROOT / 'src/wordrun')}" for path in (ROOT / "src/wordrun").rglob("*.py")}
    expected |= {f"wordrun/launch/sites/{path.name}" for path in (ROOT / "src/wordrun/launch/sites").iterdir()}
    expected |= {"hydra_plugins/wordrun_sweep/__init__.py", "wordrun/_version.py"}
    expected |= {"wordrun/py.typed", "wordrun/launch/rank_env.sh", "wordrun/launch/setup.sh"}
    expected |= {"wordrun/conf/__init__.py"}
    expected |= {"wordrun/track/report/page.html.jinja"}
    assert expected - names == set()
    assert {name for name in names if ".dist-info/" not in name and ".data/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    manual = {name.partition(".data/data/")[2] for name in names if ".data/" in name}
    assert manual == {"share/man/man1/launch.1", "share/man/man1/wordrun.1"}


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel. It finds the other packages where the tests have them.

    The folder with them has the editable installation of wordrun, too, but only the tests' own environment reads the
    .pth file that activates it.
    """
    folder = tmp_path_factory.mktemp("new") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for library in Path(sys.prefix, "lib").iterdir():  # the mpich package has its libraries there
        if not library.name.startswith("python"):
            (folder / "lib" / library.name).symlink_to(library)
    install(folder, wheel)
    return folder


def install(environment: Path, *wheels: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    options = ["install", "--quiet", "--no-deps", "--no-compile", "--no-index", "--ignore-installed"]
    subprocess.run([*pip, *options, *map(str, wheels)], check=True, timeout=120)


@pytest.fixture
def installed(environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the new environment first in PATH; return its site-packages."""
    monkeypatch.setenv("PATH", f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def test_the_installed_package_is_the_one_that_is_tested(installed: Path, command: Command) -> None:
    script = "import wordrun, wordrun.conf, hydra_plugins.wordrun_sweep as p; print(wordrun, wordrun.conf, p)"
    done = command("python", "-c", script)
    assert done.stdout.count(f"from '{installed}/") == 3, done.stdout + done.stderr


def test_it_trains_and_reports_in_an_empty_folder(installed: Path, command: Command, tmp_path: Path) -> None:
    small = ["model.n_layer=1", "model.n_embd=16", "train.max_iters=3", "train.eval_iters=1", "train.sample_tokens=4"]
    words = ["data=sample", "train=smoke", *small, "tracker=jsonl", "train.backend=DDP", "hydra.run.dir=run"]
    done = command("wordrun", *words, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 5000
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (told["steps"], told["exit_reason"]) == (3, "finished")
    (metadata,) = installed.glob("wordrun-*.dist-info")
    assert metadata.name == f"wordrun-{told['versions']['wordrun']}.dist-info"


def test_a_new_project_is_installed_and_trains_beside_it(
    environment: Path, installed: Path, command: Command, tmp_path: Path
) -> None:
    assert command("wordrun", "new", "adder").returncode == 0
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    assert command(*build, "-w", tmp_path, tmp_path / "adder").returncode == 0
    install(environment, *tmp_path.glob("adder-*.whl"))
    shutil.rmtree(tmp_path / "adder")
    where = command("python", "-c", "import adder; print(adder.__file__)").stdout
    assert where.startswith(str(installed)), where
    small = ["model.n_layer=1", "model.n_embd=16", "model.block_size=32", "train.eval_iters=2", "train.eval_interval=4"]
    words = ("launch", "-n", "2", "wordrun", "model=adder", "data=adder", "tracker=jsonl", *small)
    done = command(*words, "train.backend=FSDP", "train.max_iters=8", "hydra.run.dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (line["val_loss"] for line in read(tmp_path / "run") if "val_loss" in line)
    assert second < first


def test_hydra_finds_the_plugins(installed: Path, command: Command) -> None:
    words = ["hydra/launcher=wordrun", "hydra/sweeper=wordrun_optuna", "hydra.launcher.np=2"]
    done = command("wordrun", "--cfg", "hydra", "--package", "hydra", *words)
    assert done.returncode == 0, done.stderr
    composed = yaml.safe_load(done.stdout)
    assert composed["launcher"]["np"] == 2
    assert composed["sweeper"]["_target_"] == "hydra_plugins.wordrun_sweep.OptunaSweeper"


def test_the_shell_helpers_find_the_environment(environment: Path, installed: Path, command: Command) -> None:
    done = command("bash", "-c", 'source "$(wordrun --setup-sh)" && setup_python && command -v launch')
    assert done.returncode == 0, done.stderr
    assert f"python     {environment}/bin/python (Python 3." in done.stdout
    assert "wordrun is installed there" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{environment}/bin/launch"


def test_the_version_of_an_archive_without_git(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == PROJECT["tool"]["setuptools_scm"]["fallback_version"]


def test_the_version_comes_from_the_tag(source: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "pyproject.toml").write_bytes((source / "pyproject.toml").read_bytes())
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"], ["tag", "-a", "v7.8.9", "-m", "it"]):
        assert command(*git, *words).returncode == 0
    assert command(sys.executable, "-m", "setuptools_scm").stdout.strip() == "7.8.9"


def test_files_that_the_design_page_names_exist() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("design.md", "decisions.md"))
    names = re.findall(r"`(?!outputs/)([\w*/]+(?:\.(?:py|sh|yaml)|/))`", text)
    assert len(names) > 40
    assert [
        name for name in names if not list((ROOT / "src" / "wordrun").glob(name)) and not list(ROOT.glob(name))
    ] == []


def test_names_on_the_design_page_are_defined() -> None:
    table = (ROOT / "docs" / "design.md").read_text().partition("\n## A run")[0]
    places = [row.rpartition(" | ")[2] for row in table.splitlines() if row.startswith("| ")]
    names = {name for place in places for name in re.findall(r"`(?:\w+\.)?([A-Za-z_]+)(?:\(\))?`", place)} - {
        "py",
        "yml",
    }
    assert len(names) > 10
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "wordrun").rglob("*.py"))
    assert [
        name for name in sorted(names) if not re.search(rf"(def|class) {name}\b|^ *{name}\b.* = ", source, re.M)
    ] == []
