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
    assert "> **Untried ([status](../status.md)): tell us.**" in page(site)
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


@pytest.mark.parametrize("site", SITES)
def test_no_two_jobs_at_once_where_a_user_may_have_one(site: str) -> None:
    known = site_files.load(str(Path(site_files.OWN, f"{site}.yaml")))
    for block in re.findall(r"```console\n(.*?)```", page(site), re.DOTALL):
        queues = re.findall(r"^launch --submit -N .* --queue (\S+)", block, re.MULTILINE)
        assert all(queues.count(name) <= known.queue(name).get("jobs", 2) for name in queues)


INTERACTIVE = {
    "aurora": "qsub -I -A PROJECT -q debug -l select=1 -l walltime=0:30:00 -l filesystems=home:flare -l place=scatter",
    "perlmutter": "salloc --account=PROJECT --qos=interactive --nodes=1 --time=0:30:00 --ntasks-per-node=4 "
    "--cpus-per-task=32 --gpus-per-node=4 --constraint=gpu",
}


@pytest.mark.parametrize("site", SITES)
def test_the_command_for_an_interactive_job_is_complete(site: str) -> None:
    (line,) = dict.fromkeys(re.findall(r"^(?:qsub -I|salloc) .*$", page(site), re.MULTILINE))
    assert line == INTERACTIVE.get(site, line)
    known = site_files.load(str(Path(site_files.OWN, f"{site}.yaml")))
    assert ("PROJECT" in line) == bool(known.submit.get("account_needed"))
    assert known.submit.get("filesystems", "") in line


def test_the_snippet_with_nccls_plugin_is_a_site_file() -> None:
    import yaml

    (block,) = re.findall(r"^ *```yaml\n(.*?)^ *```", page("polaris"), re.MULTILINE | re.DOTALL)
    given, own = yaml.safe_load(block), yaml.safe_load(Path(site_files.OWN, "polaris.yaml").read_text())
    assert site_files.mistakes({**own, **given}) == []
    assert given["modules"][:-1] == own["modules"], "the plugin's libraries come after the modules'"
    assert given["env"].items() >= {"TMPDIR": own["env"]["TMPDIR"]}.items()
    assert given["env"].keys() >= own["env"].keys()
