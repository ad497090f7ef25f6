"""The commands that a run suggests at its end."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun import cli
from wordrun.config.compose import compose
from wordrun.train import hints
from wordrun.train.hints import has_huggingface_format, next_steps, own_command

if TYPE_CHECKING:
    from conftest import Start

Words = Callable[..., list[str]]
WORDS = ["data=sample", "train.max_iters=50", "train.resume=auto", "data.mix={a: 1}"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints."""
    for step in (10, 20):
        (tmp_path / "runs" / "a" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    return tmp_path / "runs" / "a"


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        (["python3", "-m", "wordrun"], ["python3", "-m", "wordrun"]),
        (["/usr/bin/python3", "/opt/bin/wordrun", "train"], ["wordrun", "train"]),
        (["python", "own.py"], ["python", "own.py"]),
    ],
    ids=["module", "script", "own program"],
)
def test_a_command_is_shown_as_it_was_typed(
    started: list[str], shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", [*started, *WORDS])
    assert own_command(WORDS) == [*shown, *WORDS]
    assert own_command(["model=gpt2"]) == ["wordrun", "model=gpt2"]  # called from Python


def test_a_finished_run_is_used_or_trained_further(run: Path) -> None:
    first, *lines = next_steps(run, ["python", "-m", "wordrun", *WORDS], 2, 50, finished=True).splitlines()
    assert first == "next: generate text, export the model, train further"
    assert [shlex.split(line) for line in lines] == [
        ["python", "-m", "wordrun", "generate", "run=runs/a"],
        ["python", "-m", "wordrun", "export", "run=runs/a"],
        [
            *shlex.split("launch -n 2 python -m wordrun data=sample"),
            "data.mix={a: 1}",
            "train.max_iters=100",
            "train.resume=runs/a",
        ],
    ]
    text = next_steps(run, (), 1, 50, finished=True)
    assert text.splitlines()[1:] == ["  wordrun generate run=runs/a", "  wordrun export run=runs/a"]
    mute = next_steps(run, (), 1, 50, finished=True, huggingface=False, generates=False)
    assert mute.splitlines()[1:] == ["  wordrun export run=runs/a form=checkpoint"]


def test_a_stopped_run_is_continued_as_it_was_launched(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDRUN_LAUNCH_RECORD", "outputs/launches/1.json")
    (run / "launch.json").write_text(json.dumps({"launch": ["launch", "-N", "2", "--env", "A=b c"]}))
    first, line = next_steps(run, ["wordrun", *WORDS], 8, 50, finished=False).splitlines()
    assert first == "to continue from step 20:"
    assert shlex.split(line) == [
        *shlex.split("launch -N 2 --env"),
        "A=b c",
        "wordrun",
        "data=sample",
        "train.max_iters=50",
        "data.mix={a: 1}",
        "train.resume=runs/a",
    ]
    assert next_steps(run, (), 8, 50, finished=False).endswith("  the same options, with train.resume=runs/a")
    assert next_steps(run, ["wordrun", *WORDS], 8, 20, finished=False) == "", "it has failed after its last step"


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["/opt/my env/bin/wordrun", "train"], "'/opt/my env/bin/wordrun'"),
        (["/usr/bin/python", "-u", "-m", "wordrun", "data=sample"], "/usr/bin/python -u -m wordrun"),
        (["python", "own.py"], "wordrun"),
    ],
)
def test_the_next_commands_start_the_same_wordrun(command: list[str], program: str, run: Path) -> None:
    line = next_steps(run, command, 1, 50, finished=True).splitlines()[1]
    assert line == f"  {program} generate run=runs/a"


def test_options_of_a_new_run_are_not_those_of_its_continuation(run: Path, tmp_path: Path) -> None:
    words = ["wordrun", "train.init_from=gpt2", "hydra.run.dir=runs/b", "model=gpt2"]
    same = hints.resume_command(run, run, words, 1)
    assert same == "wordrun hydra.run.dir=runs/b model=gpt2 train.resume=runs/a"
    assert hints.resume_command(run, tmp_path / "runs/b", words, 1) == "wordrun model=gpt2 train.resume=runs/a"


def test_a_run_without_a_checkpoint_has_no_next_step(tmp_path: Path) -> None:
    assert next_steps(tmp_path, ["wordrun"], 1, 50, finished=False) == ""


@pytest.mark.parametrize("name", ["plain", "with space", "a,b", "x=y", "ünï"])
def test_a_directory_is_quoted_for_hydra(name: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(hints.setting("train.resume", Path("runs") / name))
    assert str(parsed.value()).strip('"') == f"runs/{name}"


OFFER = "an unfinished run with these options is at step 4; to continue it:"
LOCK = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"


def test_an_unfinished_run_is_offered(
    small: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str], start: Start
) -> None:
    def said(*words: str) -> str:
        assert cli.main([*small("train.sample_tokens=0"), *words]) == 0
        return capsys.readouterr().out

    assert OFFER not in said()
    (folder,) = tmp_path.glob("outputs/text/*/*")
    assert OFFER not in said("train.max_iters=5")  # the first is finished
    record = json.loads((folder / "run.json").read_text())
    for path in tmp_path.glob("outputs/text/*/*"):
        if path != folder:
            shutil.rmtree(path)
    (folder / "run.json").write_text(json.dumps({**record, "exit_reason": "stopped by SIGTERM, saved"}))
    assert OFFER not in said("train.max_iters=6", "optimizer.learning_rate=1")
    assert OFFER not in said("train.max_iters=6", "model.batch_size=1")
    assert OFFER not in said("train.max_iters=4")
    holder = start(sys.executable, "-c", LOCK, folder / ".lock", stdin=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert OFFER not in said("train.max_iters=6")
    holder.kill()
    holder.wait()
    for path in tmp_path.glob("outputs/text/*/*"):
        if path != folder:
            shutil.rmtree(path)
    assert OFFER not in said("train.max_iters=2")
    (newer,) = (path for path in tmp_path.glob("outputs/text/*/*") if path != folder)
    (newer / "run.json").write_text(json.dumps({**record, "exit_reason": "stopped by SIGTERM, saved"}))
    text = said("train.max_iters=6", "train.resume=auto")  # of two, the one that got further
    line = text[text.index(OFFER) :].splitlines()[1]
    assert shlex.split(line)[-1] == f"train.resume={folder.relative_to(tmp_path)}"
    assert cli.main(shlex.split(line)[1:]) == 0
    assert "at step 4" in capsys.readouterr().out
    assert json.loads((folder / "run.json").read_text())["steps"] == 6


@pytest.mark.parametrize(
    ("words", "can"),
    [
        ("model=nano", True),
        ("model=modern", True),
        ("model=modern model.softcap=15", False),
        ("model=moe_debug model.n_shared=0", False),  # its routers get biases
        ("model=moe_debug model.n_shared=0 model.balance_rate=0", True),
        ("model=moe_debug model.balance_rate=0", False),
        ("model=convnet data=cifar10 data.path=x", False),
    ],
)
def test_an_export_is_suggested_in_a_form_that_the_model_has(words: str, can: bool) -> None:
    assert has_huggingface_format(compose([*words.split(), "tracker=jsonl"]).model) == can


def test_a_job_of_which_most_is_unused(
    small: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    pbs = {"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "nodes")}
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}
    two = "this job has 2 nodes with 4 devices each, and this run uses one device; to use all:\n  launch wordrun a=1"
    assert hints.unused(["wordrun", "a=1"], 4, pbs) == hints.unused(["wordrun", "a=1"], 4, slurm) == two
    assert hints.unused([], 4, {**slurm, "SLURM_NNODES": "1"}).startswith("this job has 4 devices, and this run uses ")
    for devices, env in ((1, {**slurm, "SLURM_NNODES": "1"}), (1, {**pbs, "PBS_NODEFILE": "/none"}), (4, {})):
        assert hints.unused([], devices, env) == ""
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert cli.main(small("train.max_iters=1", "train.sample_tokens=0")) == 0
    assert "this job has 2 nodes, and this run uses one node; to use all:\n  launch " in capsys.readouterr().out
