"""docs/sites/: every site has a page, whose facts are those of its file, and whose jobs launch accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from wordrun.launch import cli, site_files

ROOT = Path(__file__).parents[2]
SITES = sorted(path.stem for path in Path(site_files.OWN).glob("*.yaml"))


def page(site: str) -> str:
    return (ROOT / "docs/sites" / f"{site}.md").read_text()


def test_every_site_has_a_page_in_the_list() -> None:
    listed = re.findall(r"\]\((\w+)\.md\)", page("index"))
    assert sorted(listed) == SITES == sorted({path.stem for path in (ROOT / "docs/sites").glob("*.md")} - {"index"})


@pytest.mark.parametrize("site", SITES)
def test_the_facts_are_current(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import make_sites

    assert page(site) == make_sites.render(make_sites.sites()[site], page(site)), "run: python docs/make_sites.py"
    assert "> **Not yet run there.**" in page(site)
    assert "launch --doctor --json > doctor.json" in page(site)


@pytest.mark.parametrize("site", SITES)
def test_launch_accepts_the_jobs(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = re.findall(r"^launch --submit (?!--dry-run).*$", page(site).replace("\\\n", ""), re.MULTILINE)
    assert len(jobs) == 2
    for job in jobs:
        words = shlex.split(job)[1:]
        chosen = [] if "--site" in words else ["--site", site]
        assert cli.main(["--dry-run", *chosen, *words]) == 0
        script = capsys.readouterr().out
        assert "PROJECT" in script or "--account" not in job
        assert f"launch {' '.join(words[words.index('-N') : words.index('-N') + 2])}" in script
