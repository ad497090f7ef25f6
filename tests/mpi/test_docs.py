"""The documentation matches the code: the reference is current, the examples run, the links work."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.forked_programs

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_reference_and_manual_pages_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    from make_man import pages
    from make_reference import render

    assert (ROOT / "docs" / "reference.md").read_text() == render(), "run: python docs/make_reference.py"
    for name, text in pages().items():
        assert (ROOT / "man" / name).read_text() == text, "run: python docs/make_reference.py"


@pytest.mark.skipif(not shutil.which("man"), reason="needs man: apt-get install man-db")
def test_man_shows_the_manual_pages(command: Any) -> None:
    for name, words in {"launch.1": ["--idle-timeout S", "EXIT STATUS"], "wordrun.1": ["generate", "--cfg"]}.items():
        done = command("man", "--warnings", "--encoding=ascii", "--local-file", ROOT / "man" / name, MANWIDTH="130")
        assert (done.returncode, done.stderr) == (0, "")
        shown = re.sub(".\b", "", done.stdout)  # bold letters are printed twice
        assert all(word in shown for word in words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [t for t in targets if not (page.parent / t).exists()] == []


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_python_example_runs(ranks: Any, tmp_path: Path) -> None:
    (example,) = _blocks("docs/api.md", "python")
    (tmp_path / "example.py").write_text(example)
    done = ranks(1, "example.py", under="fork")
    assert done.returncode == 0, done.stderr
    assert "ROSAMUND:" in done.stdout


@pytest.mark.parametrize("n", [1, 2])
def test_ten_lines_of_dist_run(n: int, ranks: Any, tmp_path: Path) -> None:
    (example,) = _blocks("docs/dist.md", "python")
    assert len([line for line in example.splitlines() if line]) <= 10
    (tmp_path / "script.py").write_text(example)
    done = ranks(n, "script.py", under="fork")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss ") == n


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")  # draws the plots
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("_iters=150", "_iters=60")  # the steps, and those until the lowest rate
    NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(tmp_path)}}).execute()
    images = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(images) == 1
    assert not any(o.get("output_type") == "error" for cell in notebook.cells for o in cell.get("outputs", []))


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
def test_commands_of_the_front_pages_are_accepted(page: str, command: Any) -> None:
    lines = re.sub(r"\\\n *", "", "".join(_blocks(page, "console"))).splitlines()
    lines += re.findall(r"`((?:launch|wordrun) [^`]+)`", (ROOT / page).read_text())
    lines = [line for line in lines if re.match("(launch|wordrun) .*wordrun|wordrun .*=", line)]
    assert lines
    for line in lines:
        words = shlex.split(line)
        if words[0] == "launch":
            assert command("launch", "--dry-run", *words[1:]).returncode == 0, line
        done = command("wordrun", *words[words.index("wordrun") + 1 :], "--cfg", "job")
        assert done.returncode == 0, done.stderr


def test_the_readmes_own_text_trains(command: Any, tmp_path: Path) -> None:
    (line,) = re.findall(r"`(wordrun data=text[^`]+)`", (ROOT / "README.md").read_text())
    shutil.copy(ROOT / "README.md", tmp_path)
    done = command("sh", "-c", f"{line} train.max_iters=4 train.eval_interval=2 train.eval_iters=1")
    assert done.returncode == 0, done.stderr
    assert "step 4/4  val_loss" in done.stdout


def test_the_command_of_the_talk_trains(command: Any) -> None:
    (block,) = _blocks("docs/comparison.md", "console")
    line = block.replace("\\\n", "").strip()
    done = command("sh", "-c", f"{line} train.max_iters=2 train.eval_iters=1 model.batch_size=2 data.kind=sample")
    assert done.returncode == 0, done.stderr
    assert "step 2/2  val_loss" in done.stdout
    assert "train.dtype=bf16: this processor has no fast bf16" in done.stdout or "bfloat16 on cpu" in done.stdout


after_bin_venv = pytest.mark.skipif(
    not (ROOT / ".venv" / "wordrun-installed").exists(), reason="needs .venv, which bin/test makes"
)


@after_bin_venv
def test_quickstart_reuses_the_environment_and_shows_the_result(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAWN_BY_TESTS", "1")
    text = tmp_path / "data" / "shakespeare" / "input.txt"
    text.parent.mkdir(parents=True)
    text.touch()  # so that it looks for no network
    short = ["train.max_iters=4", "train.eval_interval=2", "data.kind=sample", f"hydra.run.dir={tmp_path}/run"]
    done = command(ROOT / "bin" / "quickstart", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installing" not in done.stderr
    assert "$ launch -n 2 python -m wordrun train.backend=DDP data=shakespeare" in done.stdout
    run, command_line, rest = done.stdout.partition(
        f'$ wordrun generate run={tmp_path}/run prompt="QUEEN MARGARET:" length=200\n\n'
    )
    assert "step 4/4  val_loss" in run
    assert "next: " not in run  # one list of commands is enough
    assert command_line
    written, _, end = rest.partition("\nCurve:")
    assert written.startswith("QUEEN MARGARET:")
    assert len(written) > 200
    assert "trained for 4 steps" in done.stderr
    end = f"Curve:{end}"
    for name in re.findall(r"^(?:Curve|Report): +([^ \n]+)", end, re.MULTILINE):
        assert Path(name).stat().st_size > 5000
    commands = [line.split() for line in end.partition("Next")[2].splitlines() if line.startswith("  ")]
    assert commands == [
        [".", ".venv/bin/activate"],
        ["wordrun", "generate", f"run={tmp_path}/run"],
        ["wordrun", "data=text", "data.path=README.md", "train=smoke"],
        ["launch", "-n", "2", "wordrun", "data=sample", "train=smoke", "train.backend=FSDP"],
    ]


@after_bin_venv
def test_quickstart_without_a_network_is_no_failure(command: Any) -> None:
    """It introduces the text of data=sample in a sentence; the wrong option ends the test before torch is loaded."""
    done = command(ROOT / "bin" / "quickstart", "train.max_iter=4", https_proxy="http://127.0.0.1:1")
    assert done.returncode == 2
    assert "There is no connection to download it, so the model learns from a made-up\n   play instead" in done.stdout
    assert "$ launch -n 2 python -m wordrun train.backend=DDP data=sample experiment=quickstart" in done.stdout
    assert "unknown option 'train.max_iter'" in done.stderr
    assert "NOT TRAINING" not in done.stdout + done.stderr
