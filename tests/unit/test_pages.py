"""Messages that end a run name a section of docs/ where there is more to say, and that section exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun import dist
from wordrun.errors import PAGES, ConfigError, PartError, UserError, page_of, with_page
from wordrun.launch import cli

if TYPE_CHECKING:
    from conftest import Command

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE, README = ROOT / "docs", ROOT / "src/wordrun", (ROOT / "README.md").read_text()
SOURCES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file.read_text()
    for file in PACKAGE.rglob("*.py")
}
"""The source of each module, by its name."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the website make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(page: str) -> bool:
    """Return whether docs/ has the section ``PAGE.md#ANCHOR``."""
    name, _, anchor = page.partition("#")
    return anchor in anchors(DOCS / name)


def user_errors() -> set[str]:
    """Return the names of the errors that derive from UserError, except those of parts, which name a file of theirs."""
    bases = dict(re.findall(r"^class (\w+)\((\w*Error)\b", "\n".join(SOURCES.values()), re.MULTILINE))
    names = {"UserError"}
    while more := {name for name, base in bases.items() if base in names} - names:
        names |= more
    return names - {"PartError", "SeveralPartsError", "HookError"}


def test_the_sections_and_the_modules_and_functions_exist() -> None:
    assert [page for page in PAGES.values() if page and not exists(page)] == []
    functions = [raised.rpartition(".") for raised in PAGES if raised not in SOURCES]
    lost = [name for module, _, name in functions if not re.search(rf"^ *def {name}\(", SOURCES[module], re.MULTILINE)]
    assert lost == []


def test_every_module_that_ends_a_run_has_an_entry() -> None:
    ending = re.compile(rf"raise ({'|'.join(user_errors())})\(")
    modules = [module.split(".") for module, source in SOURCES.items() if ending.search(source)]
    assert len(modules) > 100
    packages = [{".".join(parts[:end]) for end in range(2, len(parts) + 1)} for parts in modules]
    assert [max(names) for names in packages if not names & {*PAGES}] == [], "add them to PAGES in errors.py"


def test_sections_named_in_the_code_exist() -> None:
    named = {found for text in SOURCES.values() for found in re.findall(r"\w+\.md#[\w-]+", text)}
    assert {"jobs.md#a-hang", "launch.md#exit-status-and-signals"} <= named
    assert [page for page in sorted(named) if not exists(page)] == []
    pages = {found for text in SOURCES.values() for found in re.findall(r"docs/(\w+\.md)", text)}
    assert [page for page in sorted(pages) if not (DOCS / page).exists()] == []


def test_a_message_names_the_section_of_the_module_that_raised_it() -> None:
    with pytest.raises(UserError) as contradiction:
        dist.discover({"RANK": "0", "WORLD_SIZE": "2"})
    assert with_page(contradiction.value) == f"{contradiction.value}\nmore: docs/dist.md#how-a-process-is-identified"
    with pytest.raises(ConfigError) as unlisted:
        raise ConfigError("here")
    assert with_page(unlisted.value) == "here"


def test_a_function_comes_before_its_module_and_a_module_before_its_package() -> None:
    assert page_of("wordrun.train.failing.explained") == ""
    assert page_of("wordrun.train.failing.FailedHooks") == PAGES["wordrun.train.failing"]
    assert page_of("wordrun.prepare.sources.hub.open") == PAGES["wordrun.prepare.sources"]
    assert page_of("wordrun.prepare.stage.copy") == PAGES["wordrun.prepare"]
    assert page_of("mine.losses") == ""


def test_a_part_that_fails_names_the_file_with_its_traceback_only() -> None:
    with pytest.raises(PartError) as failed:
        raise PartError("hook=mine", ValueError("no"), None)
    assert with_page(failed.value) == "hook=mine: ValueError: no"


def test_a_module_that_is_run_by_its_name_is_found(command: Command) -> None:
    done = command(sys.executable, "-m", "wordrun.test_dist", "--bench", "--sizes", "1")
    assert done.stderr.splitlines()[-1] == "more: docs/backends.md#how-fast-do-the-ranks-communicate"


def test_launch_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--site", "nowhere", "true"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "launch: more: docs/launch.md#sites"


def test_readme_shows_what_it_claims() -> None:
    """In the table of comparisons, each row names a test or a measurement; all of it is on the first screen."""
    start = README[: README.index("\n## Examples")]
    assert len(start.splitlines()) <= 50
    rows = re.findall(r"^\| (?!If|---|.*---)(.*) \|$", start.split("shown by |")[1], re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        shown = re.findall(r"\]\(([^)]+)\)", row.split(" | ")[2])
        assert shown
        assert [path for path in shown if not re.match("tests/|benchmarks/", path) or not (ROOT / path).exists()] == []


def test_links_of_readme_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README) if not (ROOT / link).exists()]
    assert links == []
