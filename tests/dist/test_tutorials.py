"""docs/tutorials/ and pages that are read from top to bottom: what they tell their readers to type runs.

A page's programs are the code blocks below a line with their name. Console blocks are run line by line, on forked ranks
where the page says ``launch -n``; training runs are made smaller. A text block says what the lines of the console block
before it print.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.stem: path for path in (*sorted(DOCS.glob("tutorials/*.md")), DOCS / "hangs.md", DOCS / "slow_runs.md")}
BLOCK = re.compile(r"(?:^`([\w./]+)`[^`\n]*:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = tuple(
    shlex.split("""
    model=nano
    train.max_iters=4 train.log_interval=2 train.eval_interval=4 train.eval_iters=2 train.device=cpu
    train.dtype=fp32 train.sample_tokens=2 train.check_memory=false model.n_layer=2 model.n_head=2
    model.n_embd=16 model.block_size=16 model.batch_size=4 optimizer.warmup_iters=0
""")
)
TESTED = ("launch --doctor",)
"""Commands that the README's tests run, too, and that take long."""
FEWER = {"64KB..1MB": "64KB"}
"""Of the ``--sizes`` of ``--bench``, one will do."""
SKIPPED = ("on a cluster", "takes minutes", "while a run is going")
"""Comments of lines that are left out."""
ELSEWHERE = ("git", "pip", "source", "bin/quickstart", "qsub", "sbatch", "salloc", "ssh", "rsync", "squeue", "qstat")
"""Commands that need a network, a scheduler, or another shell."""
NUMBER = re.compile(r"-?\d+\.\d+")
SHOW_STACKS = ("hangs",)
"""Pages on which ``launch`` reads what ranks do, for which they have to be its descendants."""


@pytest.mark.timeout(600)  # several launches one after the other
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.forked_programs(name not in SHOW_STACKS)) for name in PAGES],
)
def test_the_page_runs_as_it_is_written(
    name: str, ranks: Command, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    if name == "distributed":
        shutil.copytree(DOCS.parent / "examples/exercises", ".", dirs_exist_ok=True)
    for file, language, text in BLOCK.findall(PAGES[name].read_text()):
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text)
        elif language == "console":
            lines = text.replace("\\\n", " ").splitlines()
            printed = []
            for line in lines:
                if line.startswith("cd "):
                    monkeypatch.chdir(line.split()[1])
                else:
                    printed.append(run(line, ranks, command))
        elif language == "text":
            for output in printed:
                expect(text, output)
    if name == "distributed":
        ends = [Path(run, "metrics.jsonl").read_text().splitlines()[-1] for run in ("one", "ddp", "fsdp", "tp", "pp")]
        losses = [json.loads(line)["val_loss"] for line in ends]
        assert losses == pytest.approx(losses[:1] * 5, rel=1e-5)


def run(line: str, ranks: Command, command: Command) -> str:
    """Run one line of a console block and return what it printed."""
    line, _, comment = line.partition("  #")
    words = shlex.split(line)
    if words[0] in ELSEWHERE or comment.strip() in SKIPPED or line.startswith(TESTED):
        return ""
    on_ranks = words[0] == "launch" and words[1] == "-n" and not words[3].startswith("-")
    words = [FEWER.get(word, word) for word in words]
    n, rest = (int(words[2]), words[3:]) if on_ranks else (1, words)
    rest = rest[1:] if rest[0] == "python" else ["-m", *rest]
    if words[0] in ("ls", "tail") or "prepare" in words or (words[0] == "launch" and not on_ranks):
        done = command(*words, *smaller(rest), timeout=300)
    elif words[0] in ("launch", "wordrun", "python"):
        done = ranks(n, *rest, *smaller(rest), under="fork", timeout=300)
    else:
        raise AssertionError(f"neither run nor known to be impossible here: {line}")
    expected = re.search(r"ends with status (\d+)", comment)
    assert done.returncode == int(expected[1] if expected else 0), f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def smaller(words: list[str]) -> list[str]:
    """Return options that make a training run small, without those that the page sets."""
    if words[:2] != ["-m", "wordrun"] or "=" not in words[2]:
        return []
    fixed = {word.partition("=")[0] for word in words}
    return [option for option in SMALL if option.partition("=")[0] not in fixed]


def expect(text: str, printed: str) -> None:
    """Fail unless ``printed`` has the lines of ``text``, in any order, with numbers that are nearly the same."""
    missing = []
    found = printed.splitlines()
    for line in filter(None, text.splitlines()):
        same = [each for each in found if alike(line, each)]
        if not same:
            missing.append(line)
    assert missing == [], printed


def alike(line: str, other: str) -> bool:
    """Compare two lines: their numbers may differ by 1%, since processors round differently."""
    ours, theirs = ([float(number) for number in NUMBER.findall(each)] for each in (line, other))
    if " ".join(NUMBER.sub("N", line).split()) != " ".join(NUMBER.sub("N", other).split()):
        return False
    return all(math.isclose(a, b, rel_tol=1e-2, abs_tol=2e-3) for a, b in zip(ours, theirs, strict=True))
