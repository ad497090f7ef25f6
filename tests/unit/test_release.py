"""The files of a release agree: supported versions, the workflow that tests them, documented extras."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = ROOT / ".github" / "workflows"


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
