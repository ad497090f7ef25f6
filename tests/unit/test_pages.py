"""Messages that end a run name a section of docs/ where there is more to say, and that section exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from wordrun import dist
from wordrun.errors import PAGES, ConfigError, UserError, with_page
from wordrun.launch import cli

DOCS = Path(__file__).parents[2] / "docs"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the website make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("module", PAGES)
def test_the_section_and_the_module_exist(module: str) -> None:
    page, _, anchor = PAGES[module].partition("#")
    assert anchor in anchors(DOCS / page)
    assert importlib.util.find_spec(module)


def test_names_of_sections_in_the_code_exist() -> None:
    texts = [file.read_text() for file in (DOCS.parent / "src").rglob("*.py")]
    named = {found for text in texts for found in re.findall(r"docs/(\w+\.md)(?:#([\w-]+))?", text)}
    assert ("jobs.md", "a-hang") in named
    for page, anchor in named:
        assert not anchor or anchor in anchors(DOCS / page), f"docs/{page}#{anchor}"
        assert (DOCS / page).exists(), page


def test_a_message_names_the_section_of_the_module_that_raised_it() -> None:
    with pytest.raises(UserError) as contradiction:
        dist.discover({"RANK": "0", "WORLD_SIZE": "2"})
    assert with_page(contradiction.value) == f"{contradiction.value}\nmore: docs/dist.md#how-a-process-is-identified"
    with pytest.raises(ConfigError) as unlisted:
        raise ConfigError("here")
    assert with_page(unlisted.value) == "here"


def test_launch_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--site", "nowhere", "true"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "launch: more: docs/launch.md#sites"
