"""The search with Optuna: its space, its study, what it stops early, and how it continues."""

from __future__ import annotations

import csv
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from wordrun.commands.train import main
from wordrun.common.errors import ConfigError
from wordrun.study import launch_pool, search
from wordrun.study.options import LauncherOptions, SweeperOptions

# Instead of wordrun: its loss is (x - 3)^2, and with "slow" it evaluates again and again until it is stopped.
POINT = """
import json, os, signal, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
run = Path(words["hydra.run.dir"])
run.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: ((run / "saved").touch(), os._exit(75)))
value = (float(words["x"]) - 3) ** 2
if words.get("fail") == words["x"]:
    sys.exit("no")
step, slow = 0, words.get("slow") == words["x"]
while slow or step < 2:
    step += 1
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps({"step": step, "val_loss": value}), file=file)
    if slow:
        time.sleep(0.2)
(run / "run.json").write_text(json.dumps({"exit_reason": "finished"}))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "point.py").write_text(POINT)
    (tmp_path / "s").mkdir()
    return [sys.executable, "point.py"]


def run(command: list[str], *words: str, parallel: int = 1, **options: Any) -> int:
    space, fixed = search.parse(words)
    launcher, chosen = LauncherOptions(parallel=parallel), SweeperOptions(seed=1, **options)
    return search.run(Path("s"), command, launcher, chosen, space, fixed, lambda words, number: str(number))


def study() -> optuna.Study:
    return optuna.load_study(study_name="sweep", storage="sqlite:///s/study.db")


def test_the_space_is_written_in_hydras_syntax() -> None:
    words = shlex.split("""
        a=1,2 b=choice(x,y) c=range(1,8,2) d=interval(0,1) e=tag(log,interval(1e-4,1e-1))
        f=int(interval(1,5)) +g=range(0.0,1.0,0.25) h=fixed h=last
    """)
    space, fixed = search.parse(words)
    assert space == {
        "a": CategoricalDistribution(["1", "2"]),
        "b": CategoricalDistribution(["x", "y"]),
        "c": IntDistribution(1, 7, step=2),
        "d": FloatDistribution(0, 1),
        "e": FloatDistribution(1e-4, 0.1, log=True),
        "f": IntDistribution(1, 5),
        "+g": FloatDistribution(0, 0.75, step=0.25),
    }
    assert fixed == ["h=last"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a=glob(*)", r"a=glob\(\*\): a search takes choice"),
        ("a=range(3,3)", "the range is empty"),
        ("a=interval(3,1)", "a=interval"),
        ("a=1", "nothing to search"),
    ],
)
def test_what_cannot_be_searched(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search.parse([word])


def test_a_search_finds_the_best_and_continues_where_it_stopped(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("x=range(0,7)", "fail=5")
    assert run(command, *words, n_trials=4, parallel=2) == 0
    assert "sweep s: 4 of 4 points, 2 at a time" in capfd.readouterr().out
    assert len(study().trials) == 4
    assert run(command, *words, n_trials=9) == 0
    out = capfd.readouterr().out
    assert "sweep s: 5 of 9 points, 1 at a time" in out
    trials = study().trials
    assert len(trials) == 9
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert all(trial.value == (trial.params["x"] - 3) ** 2 for trial in complete)
    assert {trial.params["x"] for trial in trials if trial.state == TrialState.FAIL} <= {5}
    with Path("s/points.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert len(points) == len({trial.params["x"] for trial in trials}), "equal points run once"
    best = min(complete, key=lambda trial: trial.value or 0.0)
    assert f"best run: s/{best.user_attrs['point']}" in out
    assert Path("s/parallel.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_without_prospects_is_stopped_in_good_order(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its evaluations show it while it runs; after SIGTERM it saves."""
    for x in range(3, 8):
        assert run(command, f"x=range({x},{x + 1})", n_trials=x - 2, sampler="random") == 0
    assert run(command, "x=range(9,10)", "slow=9", n_trials=6, sampler="random") == 0
    last = study().trials[-1]
    assert last.state == TrialState.PRUNED
    assert last.intermediate_values[1] == 36
    assert Path(f"s/{last.user_attrs['point']}/saved").exists()
    assert "1 pruned" in capfd.readouterr().out


def test_another_space_is_refused(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command, "x=1,2", n_trials=1) == 0
    with pytest.raises(ConfigError, match="x: the study in s has CategoricalDistribution"):
        run(command, "x=1,3", n_trials=2)
    assert len(study().trials) == 1


def test_an_interrupted_point_is_continued_in_its_directory(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wait = launch_pool.LaunchPool.wait

    def interrupted(self: launch_pool.LaunchPool) -> list[launch_pool.Ended]:
        if Path("s/0/metrics.jsonl").exists() and not self.ending:
            signal.raise_signal(signal.SIGTERM)
        return wait(self)

    with monkeypatch.context() as patch:
        patch.setattr(launch_pool.LaunchPool, "wait", interrupted)
        assert run(command, "x=choice(2)", "slow=2", n_trials=1) == 75
    assert "continues the search" in capfd.readouterr().out
    assert [trial.state for trial in study().trials] == [TrialState.RUNNING]
    (Path("point.py")).write_text(POINT.replace("slow or", ""))
    with Path("s/0/metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 1, "val_loss": 1.0}\n' * 2
        )  # evaluations that were repeated, after more than one checkpoint
    assert run(command, "x=choice(2)", "slow=2", n_trials=1) == 0
    assert [trial.state for trial in study().trials] == [TrialState.FAIL, TrialState.COMPLETE]
    assert study().trials[1].user_attrs["point"] == 0
    assert not Path("s/1").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra.sweeper.sampler=x"], "hydra.sweeper.sampler=x should be one of tpe, random"),
        (["hydra.sweeper.metric=val_thing"], "hydra.sweeper.direction=auto: val_thing is not known to be better"),
        (["hydra.sweeper.trials=3"], "unknown option 'hydra.sweeper.trials' of hydra/sweeper=wordrun_optuna"),
    ],
)
def test_bad_options_start_nothing(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["-m", "train.seed=range(1,3)", "hydra/sweeper=wordrun_optuna", "hydra.sweep.dir=s", *words])
    assert ended.value.code == 2
    assert message in capfd.readouterr().err
    assert not Path("s").exists()


def test_a_seeded_search_continues_with_other_points(command: list[str]) -> None:
    assert run(command, "x=interval(0.0,10.0)", n_trials=2) == 0
    assert run(command, "x=interval(0.0,10.0)", n_trials=4) == 0
    assert len({trial.params["x"] for trial in study().trials}) == 4


def test_the_table_names_a_point_once(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "x=1,2", n_trials=6) == 0
    table = capsys.readouterr().out.split("best val_loss")[-1]
    assert [line.split() for line in table.splitlines() if line[:7].strip().isdigit()] in (
        [["0", "1.0000", "2"], ["1", "4.0000", "1"]],
        [["1", "1.0000", "2"], ["0", "4.0000", "1"]],
    )
