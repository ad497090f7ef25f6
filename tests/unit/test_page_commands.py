"""Commands in the console blocks of docs/ are accepted: launch's options, overrides, and the layout of the ranks.

The pages in OWN_TESTS have tests that run their commands.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from wordrun import cli
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.launch.parser import parse

DOCS = Path(__file__).parents[2] / "docs"
OWN_TESTS = {"extend", "extend_launch", "finetune", "tasks", "dist", "sweeps"}
OTHERS = {"pip", "python", "python3", "git", "eval", "source", ".", "#!/bin/bash", "#SBATCH"}
"""What lines begin with that are not wordrun's."""


def lines(page: Path) -> list[str]:
    """Return the commands of a page, without comments."""
    text = re.sub(r"\\\n *", " ", page.read_text())
    blocks = re.findall(r"^ *```(?:console|bash|sh)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    commands = "".join(blocks).splitlines() + re.findall(r"^    ((?:launch|wordrun) [^<\[\n]*)$", text, re.MULTILINE)
    return [command for line in commands if (command := re.split("  +#|   +", line.strip())[0])]


COMMANDS = [
    pytest.param(line, id=f"{page.stem}: {line}")
    for page in sorted(DOCS.glob("*.md"))
    if page.stem not in {*OWN_TESTS, "reference"}
    for line in lines(page)
    if line.split()[0] not in OTHERS and "--completion" not in line
]


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_is_accepted(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, ranks, per_node = shlex.split(line), 1, 1
    if words[0] == "launch":
        options = parse(words[1:])
        per_node = options.ppn or options.np or 4
        ranks, words = options.np or (options.nodes or 1) * per_node, list(options.command)
    if words[:3] == ["python", "-m", "wordrun"]:
        words = words[2:]
    if words[:1] != ["wordrun"]:
        return  # launch started something else, or nothing
    command = words.pop(1) if words[1] in cli.COMMANDS else "train"
    words = words[1:]
    if command in ("generate", "export"):  # there is no run, but mistakes in options are reported first
        assert cli.main([command, *words]) != 0
        assert "outputs/latest does not exist" in capsys.readouterr().err
    elif command == "study":
        with pytest.raises(SystemExit):
            cli.main([command, words[0], "--help"])
        shown = capsys.readouterr().out
        assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in shown] == []
    if command in ("train", "prepare", "plan", "study"):
        # Without options of other commands and of Hydra, of a run that does not exist, and with several values.
        other = r"hydra[./]|plan\.|train.resume=runs|[\w.]+=([^\[,]+,|\w+\()"
        overrides = [word for word in words if re.match(r"[\w.]+=", word) and not re.match(other, word)]
        cfg = compose([*overrides, "train.device=cpu"])
        if command == "train":
            check(cfg, ranks, per_node)
