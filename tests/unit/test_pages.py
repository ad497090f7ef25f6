"""Messages that end a run name a section of docs/ where there is more to say, and that section exists."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun import dist
from wordrun.common.errors import ConfigError, PartError, UserError, WorldError, with_page
from wordrun.launch import cli

if TYPE_CHECKING:
    from conftest import Command

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE, README = ROOT / "docs", ROOT / "src/wordrun", (ROOT / "README.md").read_text()
SOURCES = [file.read_text() for file in PACKAGE.rglob("*.py")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the website make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(page: str) -> bool:
    """Return whether docs/ has the section ``PAGE.md#ANCHOR``."""
    name, _, anchor = page.partition("#")
    return anchor in anchors(DOCS / name)


def test_sections_named_in_the_code_exist() -> None:
    named = {found for text in SOURCES for found in re.findall(r"(?:extend/)?\w+\.md#[\w-]+", text)}
    assert {"hangs.md#a-hang", "how_launch_works.md#exit-status-and-signals"} <= named
    assert [page for page in sorted(named) if not exists(page)] == []
    pages = {found for text in SOURCES for found in re.findall(r"docs/([\w/]+\.md)", text)}
    assert [page for page in sorted(pages) if not (DOCS / page).exists()] == []


def test_a_message_names_the_section_of_its_error() -> None:
    with pytest.raises(UserError) as contradiction:
        dist.discover({"RANK": "0", "WORLD_SIZE": "2"})
    assert with_page(contradiction.value) == f"{contradiction.value}\nmore: docs/dist.md#how-a-process-is-identified"
    assert with_page(WorldError("here", page="hangs.md#a-hang")) == "here\nmore: docs/hangs.md#a-hang"
    assert with_page(ConfigError("here")) == "here"
    sent = pickle.loads(pickle.dumps(ConfigError("here", page="hangs.md#a-hang")))  # to another process
    assert with_page(sent) == "here\nmore: docs/hangs.md#a-hang"


def test_a_part_that_fails_names_the_file_with_its_traceback_only() -> None:
    with pytest.raises(PartError) as failed:
        raise PartError("hook=mine", ValueError("no"), None)
    assert with_page(failed.value) == "hook=mine: ValueError: no"


def test_a_module_that_is_run_by_its_name_names_it(command: Command) -> None:
    done = command(sys.executable, "-m", "wordrun.test_dist", "--bench", "--sizes", "1")
    assert done.stderr.splitlines()[-1] == "more: docs/backends.md#how-fast-do-the-ranks-communicate"


def test_launch_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--site", "nowhere", "true"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "launch: more: docs/site_files.md#site-files"


def test_the_readme_is_one_screen_and_each_comparison_has_figures() -> None:
    assert len(README.splitlines()) <= 70
    assert len(re.findall(r"^launch python -m wordrun train.backend=DDP data=shakespeare$", README, re.MULTILINE)) == 2
    rows = re.findall(r"^\| \w.* \|$", (DOCS / "comparison.md").read_text().partition("\n## ")[0], re.MULTILINE)
    assert len(rows) == 6  # with the heading
    assert [row for row in rows[1:] if not re.search(r"\]\((\.\./benchmarks/results/|#)[^)]*\) \|$", row)] == []


def test_links_of_readme_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README) if not (ROOT / link).exists()]
    assert links == []


def test_the_table_of_variables_is_complete() -> None:
    page = (DOCS / "how_launch_works.md").read_text()
    rows = re.findall(r"^\| `(WORDRUN_\w+)` \|([^|]*\|[^|]*)\|", page, re.MULTILINE)
    folders = (PACKAGE, ROOT / "conf", ROOT / "bin")
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    used = {name.decode() for file in files for name in re.findall(rb"\bWORDRUN_[A-Z0-9_]+\b", file.read_bytes())}
    assert sorted(name for name, _ in rows) == sorted(used | {"WORDRUN_GPU_TESTS"})
    for name, who in rows:
        for path in re.findall(r"`(.*?)`", who):
            file = (ROOT if path.split("/")[0] in ("bin", "conf", "tests") else PACKAGE) / path
            assert file.is_file(), f"{name}: {path}"


THEIRS = re.compile(
    r"command not found|no matches found|ImportError|from mpi4py|torchvision|rank 0 of 1|Address already|NCCL|CUDA|"
    r"Bus error|No space left|BAD TERMINATION|srun:"
)
"""Messages of other programs on the page on troubleshooting."""


def test_messages_on_the_page_on_troubleshooting_are_those_of_the_source() -> None:
    joined = [re.sub(r'" *\n\s*[rf]*"', "", text) for text in SOURCES]
    source = re.sub(r"\{[^{}]*\}|%[sdg]|%\.\d[a-z]", "\0", "\n".join(joined))
    rows = re.findall(r"^\| (.*?) \| ", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if not THEIRS.search(message)]
    assert len(quoted) > 15
    for message in quoted:
        # What depends on the run: numbers, names in capitals, values in quotes.
        words = [part.strip(" ,;:(=") for part in re.split(r"\.\.\.|'[^']*'|[\w.:]*\d[\w.:]*|\b[A-Z_]{3,}\b", message)]
        constant = [part for part in words if len(re.findall(r"\w\w+", part)) > 1]
        assert constant, message
        assert [part for part in constant if part not in source] == [], message
