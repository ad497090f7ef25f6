"""The wheel: complete, and working in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what git would commit, as a fresh clone has it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    list_files = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    parts = ["pyproject.toml", "README.md", "LICENSE", "src", "conf"]
    for name in subprocess.run([*list_files, *parts], capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=120)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_everything_but_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"wordrun/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {f"wordrun/{path.relative_to(ROOT / 'src/wordrun')}" for path in (ROOT / "src/wordrun").rglob("*.py")}
    expected |= {f"wordrun/launch/sites/{path.name}" for path in (ROOT / "src/wordrun/launch/sites").iterdir()}
    expected |= {"hydra_plugins/wordrun_sweep/__init__.py"}
    expected |= {"wordrun/py.typed", "wordrun/launch/rank_env.sh", "wordrun/conf/__init__.py"}
    expected |= {f"wordrun/report/{name}.html.jinja" for name in ("page", "trace", "profile")}
    assert expected - names == set()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=120)
    return folder


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH comes before the site-packages, in which the editable installation is.
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=60)


def test_the_installed_package_is_the_one_that_is_tested(installed: Path) -> None:
    done = run(installed, "-c", "import wordrun, wordrun.conf; print(wordrun.__file__, wordrun.conf.__file__)")
    assert all(Path(file).is_relative_to(installed) for file in done.stdout.split())
    assert len(done.stdout.split()) == 2


def test_the_config_composes_from_an_installed_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-m", "wordrun", "--cfg", "job", "model=gpt2", "experiment=shakespeare")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"]["name"] == "gpt_shakespeare"
    assert list(tmp_path.iterdir()) == []


def test_hydra_finds_the_plugins_of_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    words = ["hydra/launcher=wordrun", "hydra/sweeper=wordrun_optuna", "hydra.launcher.np=2"]
    done = run(installed, "-m", "wordrun", "--cfg", "hydra", "--package", "hydra", *words)
    assert done.returncode == 0, done.stderr
    composed = yaml.safe_load(done.stdout)
    assert composed["launcher"]["np"] == 2
    assert composed["sweeper"]["_target_"] == "hydra_plugins.wordrun_sweep.OptunaSweeper"


@pytest.mark.parametrize("script", ["launch", "wordrun"])
def test_console_scripts_are_installed(script: str, installed: Path) -> None:
    done = run(installed, str(installed / "bin" / script), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_version_is_written_twice_and_the_same() -> None:
    import wordrun

    assert PROJECT["project"]["version"] == wordrun.__version__


def test_files_that_the_design_page_names_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    names = re.findall(r"`(?!outputs/)([\w*/]+(?:\.(?:py|sh|yaml)|/))`", text)
    assert len(names) > 40
    assert [
        name for name in names if not list((ROOT / "src" / "wordrun").glob(name)) and not (ROOT / name).exists()
    ] == []
