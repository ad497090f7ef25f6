"""Commands in the console blocks of docs/ run, in this process.

``launch`` runs with ``--dry-run``, as in a SLURM job of eight nodes where it asks for nodes; what it would start is
then composed and checked for that number of ranks. ``plan``, ``ls``, ``tail``, ``report``, ``generate``, ``export``,
``prepare`` of small data, and ``--help``, ``--cfg`` and the like run as they are. Training runs and studies, and what
needs a network, are composed and checked only. The pages in OWN_TESTS have tests that run their commands.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from wordrun import cli
from wordrun.config.compose import compose
from wordrun.config.rules import check
from wordrun.launch.cli import main as launch
from wordrun.launch.parser import parse

DOCS = Path(__file__).parents[2] / "docs"
OWN_TESTS = {"extend", "extend_launch", "finetune", "tasks", "dist", "sweeps", "hangs", "slow_runs"}
OTHERS = {"pip", "python", "python3", "git", "eval", "source", ".", "#!/bin/bash", "#SBATCH"}
"""What lines begin with that are not wordrun's."""
NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-8]", "SLURM_JOB_CPUS_PER_NODE": "64(x8)"}
JOB = ["--scheduler", "slurm", "--ppn", "4", "--walltime", "1:00:00"]
"""What a submission needs on a machine without a scheduler."""
SHORT = shlex.split("""
    data=sample tracker=jsonl model=nano model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=16
    train.max_iters=2 train.eval_interval=1 train.eval_iters=1 train.dtype=fp32 train.device=cpu train.sample_tokens=0
    hooks=[ema]
""")
ON_A_RUN = ("ls", "tail", "report", "generate", "export")


def lines(page: Path) -> list[str]:
    """Return the commands of a page, without comments."""
    text = re.sub(r"\\\n *", " ", page.read_text())
    blocks = re.findall(r"^ *```(?:console|bash|sh)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    indented = r"^    ((?:WORDRUN_\w+=\S+ )*(?:launch|wordrun) [^<\[\n]*)$"
    commands = "".join(blocks).splitlines() + re.findall(indented, text, re.MULTILINE)
    return [command for line in commands if (command := re.split(" +#|   +", line.strip())[0])]


COMMANDS = [
    pytest.param(line, id=f"{page.stem}: {line}")
    for page in sorted(DOCS.glob("*.md"))
    if page.stem not in {*OWN_TESTS, "reference"}
    for line in lines(page)
    if line.split()[0] not in OTHERS
]


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 70


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder ``outputs`` after a short run of ``model=nano``."""
    folder = tmp_path_factory.mktemp("page") / "outputs"
    assert cli.main([*SHORT, f"hydra.run.dir={folder}/shakespeare/nano-DDP/1"]) == 0
    (folder / "latest").symlink_to("shakespeare/nano-DDP/1")
    shutil.copytree(folder / "latest/", folder / "old/baseline")
    return folder


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Make the environment that of a SLURM job of eight nodes."""

    def enter() -> None:
        srun = tmp_path / "bin/srun"
        srun.parent.mkdir()
        srun.write_text("#!/bin/sh\n")
        srun.chmod(0o755)
        monkeypatch.setenv("PATH", f"{srun.parent}:/usr/bin:/bin")
        for name, value in NODES.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("10.0.0.1", 0))])

    return enter


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_runs(
    line: str,
    outputs: Path,
    job: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, ranks, per_node = shlex.split(line), 1, 1
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "launch":
        options = parse(words[1:])
        per_node = options.ppn or options.np or 4
        ranks = options.np or (options.nodes or 1) * per_node
        run_launch(words[1:], job)
        words = list(options.command)
        capsys.readouterr()
    if words[:3] == ["python", "-m", "wordrun"]:
        words = words[2:]
    if words[:1] != ["wordrun"]:
        return  # launch started something else, or nothing
    words = words[1:]
    if words[0] in ON_A_RUN:
        if words[0] != "report":  # which writes into the run directory
            Path("outputs").symlink_to(outputs)
        else:
            shutil.copytree(outputs, "outputs", symlinks=True)
        assert cli.main(words) == 0, capsys.readouterr().err
    elif words[0].startswith("-") or "--cfg" in words:
        assert cli.main(words) == 0
        assert capsys.readouterr().out
    elif words[0] == "plan":
        assert cli.main([*words, *(["plan.ranks=2"] if "plan.ranks" not in line else [])]) == 0
    elif words[0] == "prepare" and "data=text" in words:
        Path("corpus").mkdir()
        rows = (json.dumps({"text": f"The square of {n} is {n * n}."}) for n in range(200))
        Path("corpus/1.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
        assert cli.main([*words, "data.workers=1", "data.prepared=prepared"]) == 0, capsys.readouterr().err
    else:
        accepted(words, ranks, per_node, capsys)


def run_launch(words: list[str], job: Callable[[], None]) -> None:
    """Run ``launch`` where it starts nothing."""
    options = parse(words)
    if options.stacks or (options.doctor and not options.submit) or options.command[:1] == ("/tmp/env/bin/python",):
        return  # tests of launch run these; a copy of the environment is not there
    if options.submit:
        extra = [word for name, value in zip(JOB[::2], JOB[1::2], strict=True) for word in (name, value)]
        given = {word for word in words if word.startswith("--")}
        missing = [extra[i : i + 2] for i in range(0, len(extra), 2) if extra[i] not in given]
        words = [word for pair in missing for word in pair] + words
    elif options.nodes or options.ppn or options.spare_nodes:
        job()
    if not (options.dry_run or options.info):
        words = ["--dry-run", *words]
    assert launch(words) == 0


def accepted(words: list[str], ranks: int, per_node: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the options of a command that trains, or that needs a network."""
    command = words[0] if words[0] in cli.COMMANDS else "train"
    if command == "study":
        with pytest.raises(SystemExit):
            cli.main([*words[:2], "--help"])
        shown = capsys.readouterr().out
        assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in shown] == []
    if command in ("train", "prepare", "study"):
        # Without options of Hydra, of a run that does not exist, and with several values.
        other = r"hydra[./]|train.resume=runs|[\w.]+=([^\[,]+,|\w+\()"
        overrides = [word for word in words if re.match(r"[\w.]+=", word) and not re.match(other, word)]
        cfg = compose([*overrides, "train.device=cpu"])
        if command == "train":
            check(cfg, ranks, per_node)
