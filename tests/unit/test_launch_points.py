"""Sweeps and studies, which launch their points themselves, under launch and in submitted jobs."""

from __future__ import annotations

import shlex

import pytest

from wordrun.common.errors import ConfigError
from wordrun.launch import cli, sweeps_and_studies
from wordrun.launch.job_script import Origin, script
from wordrun.launch.parser import parse
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import UNKNOWN
from wordrun.study import base

SWEEP = "wordrun -m train.seed=1,2 hydra/launcher=wordrun"
STUDY = "wordrun study scaling --nodes 1,2 --out o"
PYTHON = "python -m wordrun study coord --out o"
GIVEN = "--env 'NET=AWS Lib' --retries 2 --walltime-margin 9 --site /s/my.yaml"


def job(words: str, command: str, scheduler: str = "pbs") -> list[str]:
    """Return the command of the script that submits ``command`` with the options ``words`` of launch."""
    options = parse(["--submit", "--walltime", "1:00:00", *shlex.split(words), "--", *shlex.split(command)])
    text = script(options, UNKNOWN, SCHEDULERS[scheduler], Origin("/", "/no/venv", ""), "id")
    (line,) = (
        line for line in text.splitlines() if "wordrun" in line and line.startswith(("wordrun", "python", "launch"))
    )
    return shlex.split(line)


def test_a_sweeps_points_get_launchs_options() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = shlex.join(shlex.split(GIVEN))
    own = r"""'hydra.launcher.args="--env A=\"b\" --retries 3"'"""
    for more, expected in (("", given), (own, f'{given} --env A="b" --retries 3')):
        *words, args = job(f"-N 4 --ppn 2 {GIVEN}", f"{SWEEP} {more}")
        assert words == SWEEP.split()
        override = OverridesParser.create().parse_override(args)
        assert (override.key_or_group, override.is_sweep_override()) == ("hydra.launcher.args", False)
        assert override.value() == expected
    assert parse([*shlex.split(str(override.value())), "true"]).retries == 3  # the sweep's own options come last
    assert job("-N 2", SWEEP, "slurm") == SWEEP.split()  # whose srun needs no margin
    assert job("--env A=1", "wordrun sweep folder 0 1") == ["wordrun", "sweep", "folder", "0", "1"]


@pytest.mark.parametrize(
    "text",
    [
        "s/0",
        "/a b/c",
        "/a/b\\",
        "a\\",
        'say "so"',
        'a\\"',
        "${x}/y",
        "\\${x}",
        "\\\\${x}",
        "/é/ö",
        "/a=1,b=2",
        "null",
        "1",
        "",
        "$HOME/x",
    ],
)
def test_any_text_reaches_hydra_as_it_is(text: str) -> None:
    """A trailing backslash, quotes, and what looks like an interpolation included."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    word = sweeps_and_studies.quoted(text)
    value = OverridesParser.create().parse_override(f"key={word}").value()
    assert OmegaConf.create({"key": str(value)}).key == text
    assert sweeps_and_studies.unquoted(word) == text


def test_a_studys_points_get_launchs_options() -> None:
    for command in (STUDY, PYTHON):
        words = job(f"-N 2 {GIVEN}", command)
        assert words == [*command.split(), f"--launch={shlex.join(shlex.split(GIVEN))}"]
        for own in ("--launch '--env A=1'", "--launch='--env A=1'"):
            assert job("-N 2 --retries 2", f"{command} {own}")[-1] == "--launch=--retries 2 --env A=1"
    args = base.parse_study(base.new_parser("s", ""), ["--out", "o", f"--launch={GIVEN}"], (), "")
    assert args.launch == shlex.split(GIVEN)
    assert job("-N 2 --ppn 4", STUDY)[-1] == "--launch=--ppn 4"  # its points are so many nodes
    assert job("-N 2 --ppn 4", PYTHON) == PYTHON.split()


def test_the_size_of_a_job_is_not_that_of_its_points() -> None:
    def note(words: str) -> str:
        return sweeps_and_studies.note(parse(["--submit", *words.split()]))

    assert "--ppn 2 is the size of the job: the points of a sweep have the size that hydra" in note(f"--ppn 2 {SWEEP}")
    assert "-n 8 is the size of the job: the points of a study" in note(f"-n 8 {STUDY}")
    for words in (f"-N 2 {SWEEP}", f"--ppn 2 {SWEEP} hydra.launcher.nodes=1", f"--ppn 2 {STUDY}", "-n 2 wordrun"):
        assert note(words) == ""


@pytest.mark.parametrize("command", [SWEEP, STUDY])
@pytest.mark.parametrize("option", ["--elastic", "--spare-nodes 1"])
def test_options_that_points_cannot_have(option: str, command: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option.split()[0]} \w.* launches each point itself: leave it out"):
        job(option, command)


@pytest.mark.parametrize("command", [STUDY, PYTHON])
@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_study_is_not_started_as_ranks(command: str, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*option, "-N", "8", "--", *command.split()]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["launch: a study launches its points itself, so call it without launch", f"launch:   {command}"]
    submitted = shlex.join(["launch", "--submit", "--walltime", "H:MM:SS", *option, "-N", "8", "--", *command.split()])
    assert said[3] == f"launch:   {submitted}"
