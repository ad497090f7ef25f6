"""The command line: help, commands, errors before anything starts, and sweeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import wordrun
from wordrun import cli
from wordrun.backend.options import DDPConfig
from wordrun.commands.train import flags, sweep_points
from wordrun.common.errors import ConfigError
from wordrun.config import schema
from wordrun.config.registry import backends, documentation
from wordrun.data.options import TextConfig
from wordrun.model.options import ModernConfig
from wordrun.track.base import LEGEND
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.track.options import WandbConfig
from wordrun.train.optim.options import MuonConfig
from wordrun.train.options import TrainConfig

if TYPE_CHECKING:
    from conftest import Command

Words = Callable[..., list[str]]


def main(words: list[str]) -> int:
    """Run the command with ``words`` in this process and return its exit status."""
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def printed(*words: str) -> str:
    """Return what the command prints."""
    with redirect_stdout(StringIO()) as out:
        assert main([*words]) == 0
    return out.getvalue()


def test_help_fits_a_small_terminal_and_each_group_names_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed("--help").splitlines()
    assert 12 <= len(lines) < 24
    assert max(map(len, lines)) <= 80
    words = set(" ".join(lines).split())
    assert {*cli.COMMANDS, *schema.SECTIONS, "experiment", "train.backend"} - {"backend"} <= words
    assert "  launch -n 2 python -m wordrun train.backend=DDP data=shakespeare" in lines
    conf = Path(__file__).parents[2] / "conf"
    for group in {*schema.SECTIONS, "experiment"} - {"backend"}:
        names = set(re.split(r"[\s=:]+", printed("--help", group)))
        assert {path.stem for path in (conf / group).glob("*.yaml")} <= names
        assert group == "experiment" or set(schema.schemas(group)) <= names
    assert printed("--help", "train.backend").startswith(f"train.backend=NAME: {' '.join(backends())}\n")


def test_flags_and_overrides_come_in_any_order() -> None:
    assert printed("train.max_iters=7", "--help", "train").startswith("train=NAME: default smoke\n")
    assert "train.max_iters=7 " in printed("train.max_iters=7", "--help", "train")
    shown = printed("train.max_iters=7", "--cfg", "job", "data=sample")
    assert "max_iters: 7" in shown
    assert "kind: sample" in shown


def test_cfg_of_a_sweep_is_that_of_its_first_point(capsys: pytest.CaptureFixture[str]) -> None:
    """And no point is started."""
    assert "\n  seed: 5\n" in printed("-m", "--cfg", "job", "train.seed=5,6,7")
    assert capsys.readouterr().err == "the first of 3 points:\n"


def test_help_shows_the_options_of_a_group_with_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = [ModernConfig, TextConfig, DDPConfig, MuonConfig, TrainConfig, WandbConfig]
    for node in shown:
        docs = documentation(node)
        section = next(g for g in schema.SECTIONS if node in [part.options for part in schema.schemas(g).values()])
        text = printed("--help", "train.backend" if section == "backend" else section)
        assert max(map(len, text.splitlines())) <= 120
        section = "tracker.wandb" if node is WandbConfig else section
        flat = " ".join(text.split())  # long texts are wrapped
        for field in fields(node):
            meaning = re.escape(" ".join(docs[field.name].split()))
            assert re.search(rf" {section}\.{field.name}=(\[.*?\]|\S+) {meaning}", flat)
    assert set(LEGEND) <= set(printed("--help", "metrics").split())
    hooks = printed("--help", "hooks")
    assert "hooks.early_stop.patience=" in hooks
    assert max(map(len, hooks.splitlines())) <= 110


def test_the_help_of_a_group_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert columns - 10 < max(map(len, printed("--help", "train").splitlines())) <= columns


def test_the_help_of_experiments_says_what_each_is(tmp_path: Path) -> None:
    """In whole sentences; a file of the user's own may be found in two ways, and say nothing."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: []\n")
    shown = printed("--help", "experiment", "--config-dir", "conf")
    assert "experiment=quickstart: The run of bin/quickstart" in shown
    assert all(text.endswith(".") for text in shown.strip().split("\n\n") if ": " in text), shown
    assert re.findall("^experiment=mine.*", shown, re.MULTILINE) == ["experiment=mine"]


def test_help_shows_the_values_of_the_command_line() -> None:
    text = printed("--help", "model=gpt2", "train.max_iters=7")
    assert "model.n_layer=12" in text
    assert "train.max_iters=7" in text
    assert "optimizer.learning_rate" in text, "another model has another optimizer"
    assert "backend.bucket_cap_mb" not in text


def test_help_shows_choices_that_are_not_a_run_yet() -> None:
    assert "model.channels=32 " in printed("--help", "model=convnet")  # without data of images
    assert "data.path=null " in printed("--help", "data=imagefolder")  # which a run would need
    assert "model.batch_size=64 " not in printed("--help", "train.backend=FSDP")
    shown = printed("--help", "experiment=digits")
    assert shown.startswith("experiment=digits: A small network")
    for option in (
        "model.batch_size=32 ",
        "data.name=digits ",
        "optimizer.learning_rate=0.002 ",
        "train.max_iters=300 ",
    ):
        assert option in shown
    assert "experiment=quickstart" not in shown
    assert "tokenizer." not in shown


def test_help_lists_the_users_own_files(tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "tiny.yaml").write_text("defaults: [/schema/model/gpt@_here_]\nn_layer: 3\n")
    assert "\nYour own: model=tiny\n" in printed("--help", "--config-dir", "mine")
    assert re.match(r"model=NAME: (\w+\s+)*tiny\n", printed("--help", "model", "--config-dir", "mine"))
    assert "model.n_layer=3" in printed("--help", "--config-dir", "mine", "model=tiny")


def test_help_on_an_unknown_group_names_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "optimiser"]) == 2
    assert "unknown group; did you mean 'optimizer'?" in capfd.readouterr().err


def test_the_version_names_torchs_without_importing_it(command: Command) -> None:
    script = (
        "import sys; from wordrun import cli; cli.main(['--version']); print({'torch', 'hydra'} & set(sys.modules))"
    )
    expected = f"wordrun {wordrun.__version__} (torch {metadata.version('torch')})\n"
    assert command(sys.executable, "-c", script).stdout == f"{expected}set()\n"
    assert command("wordrun", "train", "--version").stdout == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max_iters", "5"], "unknown flag '--max_iters': write train.max_iters=5"),
        (["--train.max_iters=5"], "unknown flag '--train.max_iters': write train.max_iters=5"),
        (["data=sample", "--learning-rate"], "unknown flag '--learning-rate': write optimizer.learning_rate=VALUE"),
        (["--model", "gpt2"], "unknown flag '--model': write model=gpt2"),
        (["--max_iter=5"], "unknown flag '--max_iter'; did you mean 'max_iters'?"),
        (["--lr", "3e-4"], "unknown flag '--lr': write optimizer.learning_rate=3e-4"),
        (["--hlp"], "unknown flag '--hlp'; did you mean '--help'?"),
        (["--zzz"], "unknown flag '--zzz'; wordrun --help lists the options"),
    ],
)
def test_a_flag_that_is_an_option(
    words: list[str], says: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words) == 2
    assert capfd.readouterr() == ("", f"{says}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["data=text", "data.path=nothing"],
        ["data=sample", "train.resume=nothing"],
        ["data=shakespeare", "data.offline=error", "train.init_from=nothing"],
        ["generate", "run=nothing"],
        ["export", "run=nothing"],
        ["prepare", "data=text", "data.path=nothing"],
        ["--config-dir", "nothing"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_a_mistake_in_the_options(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capfd.readouterr().err
    assert len(err.partition("\nmore: docs/")[0].splitlines()) == 1
    assert "nothing" in err
    assert all(word in err for word in words if word.startswith("train."))


@pytest.mark.parametrize("words", [["--help"], ["train.max_iter=3"], ["plan", "model=gpt2"]])
def test_help_errors_and_the_plan_do_not_import_torch(words: list[str], command: Command, tmp_path: Path) -> None:
    script = f"""
import sys
from wordrun import cli
try:
    cli.main({words!r})
finally:
    print("HEAVY", *[name for name in ("torch", "mpi4py", "wandb", "matplotlib", "numpy") if name in sys.modules])
"""
    done = command(sys.executable, "-c", script)
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_reported_once_and_starts_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train.max_iter=3", "model.n_head=3"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(";")[0].split(":")[0] for line in err.splitlines()] == [
        "unknown option 'train.max_iter'",
        "model.n_embd=128 is not divisible by model.n_head=3",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_module_is_the_command(command: Command) -> None:
    done = command(sys.executable, "-m", "wordrun", "train.max_iter=3")
    assert done.returncode == 2
    assert done.stderr == "unknown option 'train.max_iter'; did you mean 'train.max_iters'?\n"


def test_a_run_goes_where_the_config_says(small: Words, tmp_path: Path) -> None:
    assert main(small("data.name=fox", "model.name=tiny")) == 0
    (folder,) = (tmp_path / "outputs" / "fox" / "tiny-DDP").iterdir()
    assert (tmp_path / "outputs" / "latest").resolve() == folder
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", folder.name)


def test_latest_is_the_newest_run(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        monkeypatch.setenv("WORDRUN_RUN_ID", name)
        assert main(small("train.max_iters=1", "train.sample_tokens=0")) == 0
    assert len(list((tmp_path / "outputs").glob("*/*/*/run.json"))) == 2
    assert (tmp_path / "outputs" / "latest").resolve().name == "second"


def test_launchs_record_moves_into_the_run_directory(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "launches" / "1.json"
    record.parent.mkdir()
    record.write_text('{"command": ["python"]}')
    monkeypatch.setenv("WORDRUN_LAUNCH_RECORD", str(record))
    assert main(small("hydra.run.dir=here")) == 0
    assert json.loads((tmp_path / "here" / "launch.json").read_text()) == {"command": ["python"]}
    assert record.resolve() == tmp_path / "here" / "launch.json"  # so that launch can complete it


# Commands


@pytest.fixture(scope="module")
def listed() -> str:
    """What ``wordrun --help`` prints."""
    return subprocess.run([sys.executable, "-m", "wordrun", "--help"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_its_help(name: str, listed: str, command: Command) -> None:
    assert re.search(rf"^  {name} +\S", listed, re.MULTILINE)
    done = command(sys.executable, "-m", "wordrun", name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"^  .*wordrun {'data=' if name == 'train' else name}", done.stdout, re.MULTILINE)
    assert "Commands (" not in done.stdout


def test_an_unknown_command_is_refused_with_the_nearest(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["pln"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("unknown command 'pln'; did you mean 'plan'? (commands: train, prepare, generate, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch", "--help"], "'launch': it is a command of its own: write launch --help"),
        (["launch", "-n", "2", "a.py"], "'launch': it is a command of its own: write launch -n 2 a.py"),
        (["resume"], "'resume': to resume a run, repeat its command with train.resume=outputs/latest"),
        (["help", "plan"], "'help': write wordrun --help plan"),
        (["doctor"], "'doctor': write launch --doctor"),
    ],
)
def test_a_word_that_is_no_command_leads_to_what_does_the_same(
    words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capfd.readouterr() == ("", f"unknown command {says}\n")


@pytest.mark.parametrize("command", ["generate", "export", "tail", "report"])
def test_there_is_no_run_yet(command: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([command]) == 2
    message = "outputs/latest does not exist: no run has been started in this folder\n"
    assert capfd.readouterr().err.startswith(message)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "latest").symlink_to("removed")  # a run had been started
    assert main([command]) == 2
    assert "no run has been started" not in capfd.readouterr().err


def test_the_command_train_is_the_default(small: Words, tmp_path: Path) -> None:
    assert main(["train", *small("hydra.run.dir=run", "train.sample_tokens=0")]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit_reason"] == "finished"


# What depends on Hydra's internals


def test_flags_are_those_of_hydra() -> None:
    from hydra._internal.utils import get_args_parser

    def described(parser: Any) -> dict[str, tuple[Any, ...]]:
        return {
            action.dest: (set(action.option_strings), type(action).__name__, action.nargs, action.const)
            for action in parser._actions
        }

    assert described(flags()) == described(get_args_parser()), (
        "Hydra's flags have changed: copy them to commands/train.py"
    )


def test_points_of_a_sweep_are_those_of_hydras_sweeper() -> None:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = ["a=1,2", "b=x", "c=range(0,3)", "+d='y,z',w", "b=u", "~e"]
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), max_batch_size=None)
    ours = [[word for word in point if word != "~e"] for point in sweep_points(words)]
    assert ours == [[word for word in point if not word.startswith("~e")] for point in batch], (
        "Hydra's sweeper has changed: see sweep_points in commands/train.py"
    )
    assert sweep_points(["a=1", "b=glob(*)", "c=1,2"]) == [["a=1"]]
    assert sweep_points(["a=1", "b=interval(0,1)"]) == [["a=1"]]
    with pytest.raises(ConfigError, match="""quote it twice: 'b="--env A=1"'"""):
        sweep_points(["a=1,2", "b=--env A=1"])


# Sweeps


def test_a_sweep_trains_every_point_in_its_own_directory(
    small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", *small("optimizer.learning_rate=1e-3,1e-2", "train.log_interval=1", "hydra.sweep.dir=sweep")]
    assert main(words) == 0
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()) == ["0", "1"]
    for number, peak in ((0, 1e-3), (1, 1e-2)):
        folder = tmp_path / "sweep" / str(number)
        assert json.loads((folder / "run.json").read_text())["exit_reason"] == "finished"
        assert read(folder)[0]["lr"] == pytest.approx(peak / 101)
        assert f"learning_rate: {peak}" in (folder / "config.yaml").read_text()
        log = (folder / "log.txt").read_text()
        assert "step 4/4  loss" in log
        assert log.count("INFO the warm-up takes 100 steps (optimizer.warmup_iters), but the run has 4: ") == 1
    said = capfd.readouterr()
    assert said.err == ""
    assert len(re.findall(r"step 4/4  loss", said.out)) == 2


def test_a_mistake_in_a_later_point_is_found_before_the_first_starts(
    small: Words, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", *small("model.n_head=2,3", "train.seed=1,2", "hydra.sweep.dir=sweep")]) == 2
    out, err = capfd.readouterr()
    assert "model.n_head=3" in err
    assert err.splitlines()[1:] == ["in point 2 of the sweep (model.n_head=3 train.seed=1); none has started"]
    assert "step 1/4" not in out
    assert not (tmp_path / "sweep").exists()


def test_a_typo_in_a_sweep_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "data=sample", "train.max_iter=2,3"]) == 2
    assert capfd.readouterr().err == "unknown option 'train.max_iter'; did you mean 'train.max_iters'?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_not_for_many_ranks(command: Command, tmp_path: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    done = command("wordrun", "-m", "train.seed=1,2", **ranks)
    assert done.returncode == 2
    assert "-m starts the points of a sweep from one process, but there are 2 ranks" in done.stderr
    assert "wordrun -m train.seed=1,2,3 hydra/launcher=wordrun hydra.launcher.np=2" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_reported_before_torch_is_loaded(command: Command) -> None:
    done = command("wordrun", "data=text", "data.path=none.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none.txt cannot be read: No such file or directory" in done.stderr
