"""The website builds without a warning, and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # 5 s of computing, with much else to do on a busy machine


@pytest.fixture(scope="module")
def website(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the website, where a broken link or anchor and a page that the navigation lacks are errors."""
    if not (ROOT / ".venv").exists():
        pytest.skip("bin/docs uses .venv, which bin/venv creates")
    folder = tmp_path_factory.mktemp("website")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([ROOT / "bin/docs", "--build", folder], capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(website: Path) -> None:
    pages = list(website.rglob("*.html"))
    assert len(pages) > 40
    loaded = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    assert {page.name: found for page in pages if (found := loaded.findall(page.read_text()))} == {}
    for page in pages:
        for script in re.findall(r'<script src="([^"]+)"', page.read_text()):
            folder = website if script.startswith("/") else page.parent
            assert (folder / script.lstrip("/")).exists(), f"{page}: {script}"


def test_the_search_knows_options_commands_and_functions(website: Path) -> None:
    found = json.loads((website / "search/search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in found}
    assert {"reference.html#backend-fsdp", "commands.html#launch", "commands.html#wordrun-plan"} <= places
    assert "api.html#wordrun.dist.setup.session" in places
    text = " ".join(entry["text"] for entry in found)
    for option in ("--idle-timeout", "backend.prefetch", "plan.ranks"):
        assert option in text, option


def test_mistakes_end_the_build(website: Path, tmp_path: Path) -> None:
    """A broken link, a broken anchor, an unknown language and a list that only GitHub would show."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n\n[a](b.md) [c](#d)\n\n```consoel\nx\n```\n\ntext\n- item\n")
    settings = re.sub(r"\nnav:\n.*", "\n", (ROOT / "mkdocs.yml").read_text(), flags=re.DOTALL)
    settings = settings.replace("docs/mkdocs_hooks.py", str(ROOT / "docs/mkdocs_hooks.py"))
    (tmp_path / "mkdocs.yml").write_text(settings.replace("extra_css: [site.css]\n", ""))
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "bin/docs", tmp_path / "bin/docs")  # which works in the folder above its own
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    build = [tmp_path / "bin/docs", "--build", "site"]
    done = subprocess.run(build, capture_output=True, text=True, timeout=500)
    assert done.returncode != 0
    for mistake in ("'b.md'", "'#d'", "'consoel'", "<li>"):
        assert mistake in done.stderr, done.stderr
