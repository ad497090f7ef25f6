"""Parts and config files from outside wordrun: a project's, an installed package's and a notebook's."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import wordrun
from wordrun.common.errors import ConfigError, UserError
from wordrun.config import project, registry
from wordrun.config.registry import KINDS, part_of, parts
from wordrun.config.schema import from_plain, to_plain
from wordrun.dist import coordination
from wordrun.train.optim.options import OptimizerConfig, SGDConfig

if TYPE_CHECKING:
    from conftest import Command

OPTIMIZER = '''
from dataclasses import dataclass

import torch

from wordrun.config import OptimizerConfig


@dataclass
class RpropConfig(OptimizerConfig):
    """Rprop: steps by the signs of gradients."""

    eta: float = 0.5
    """Factor by which a step shrinks."""


def rprop(cfg, parameters):
    return torch.optim.Rprop([p for _, p in parameters], lr=cfg.learning_rate, etas=(cfg.eta, 1.2))
'''
REGISTER = 'import wordrun\n\nwordrun.register("optimizer", "rprop", "{0}:RpropConfig", "{0}:rprop")\n'


@pytest.fixture(autouse=True)
def _only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test registers and imports."""
    before = {kind: dict(parts(kind)) for kind in KINDS}
    modules, path, registered = set(sys.modules), list(sys.path), set(registry._registered)
    yield
    for kind, each in before.items():
        registry._parts[kind].clear()
        registry._parts[kind].update(each)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.path[:] = path
    registry._registered.intersection_update(registered)
    project._project.cache_clear()
    project._installed.cache_clear()


Make = Callable[[dict[str, str]], Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write the files of a project, and make its folder the working directory."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.chdir(tmp_path)
        project._project.cache_clear()
        return tmp_path

    return write


MINE = {"wordrun.yaml": "module: my_parts", "my_parts.py": REGISTER.format("my_rprop"), "my_rprop.py": OPTIMIZER}


def refusal(*words: str) -> str:
    """Return the message with which ``words`` are refused."""
    with pytest.raises(ConfigError) as caught:
        wordrun.compose(["data=sample", *words])
    return str(caught.value)


@pytest.mark.parametrize("where", ["wordrun.yaml", "pyproject.toml", "src", "entry point"])
def test_a_part_is_chosen_by_its_dataclass_alone(where: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict(MINE)
    if where != "wordrun.yaml":
        del files["wordrun.yaml"]
    if where == "pyproject.toml":
        files[where] = '[tool.wordrun]\nmodule = "my_parts"\n'
    if where == "src":
        files = {f"src/{name}": text for name, text in files.items()} | {"wordrun.yaml": MINE["wordrun.yaml"]}
    if where == "entry point":
        files["mine-1.0.dist-info/entry_points.txt"] = "[wordrun]\nmine = my_parts\n"
        files["mine-1.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n"
    folder = make(files)
    if where == "entry point":
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.chdir("/")
        project._installed.cache_clear()
    assert wordrun.compose(["data=sample"]).optimizer.name == "muon"
    assert "my_parts" in sys.modules
    assert "my_rprop" not in sys.modules  # imported when it is chosen
    cfg = wordrun.compose(["data=sample", "optimizer=rprop", "optimizer.eta=0.25"])
    assert (cfg.optimizer.name, cfg.optimizer.eta) == ("rprop", 0.25)  # type: ignore[attr-defined]
    assert part_of("optimizer", cfg.optimizer).load().__name__ == "rprop"
    assert from_plain(json.loads(json.dumps(to_plain(cfg)))).optimizer == cfg.optimizer
    sent = coordination.dumps(cfg)
    del sys.modules["my_rprop"]  # as on another rank
    received = coordination.loads(sent)
    assert part_of("optimizer", received.optimizer).name == "rprop"
    assert refusal("optimizer=rpop").startswith("optimizer=rpop: unknown optimizer; did you mean 'rprop'?")
    assert (
        refusal("optimizer=rprop", "optimizer.ata=1") == "unknown option 'optimizer.ata'; did you mean 'optimizer.eta'?"
    )


@dataclass
class NotebookConfig(OptimizerConfig):
    """Defined in a notebook."""

    size: float = 0.5
    """A size."""


def test_a_class_registered_in_python(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"no optimizer has the options NotebookConfig: register it"):
        part_of("optimizer", NotebookConfig())
    for _ in range(2):  # a cell may run again
        wordrun.register("optimizer", "noted", NotebookConfig, dict)
    cfg = wordrun.compose(["data=sample", "optimizer=noted"])
    assert type(cfg.optimizer) is NotebookConfig
    assert part_of("optimizer", cfg.optimizer).load() is dict
    with pytest.raises(UserError, match="config has optimizer=gone, which is not registered here"):
        from_plain({"optimizer": {"schema": "gone"}})


TWICE = """
import wordrun, sys
from dataclasses import dataclass
from wordrun.config import OptimizerConfig

@dataclass
class NotedConfig(OptimizerConfig):
    first: int = 1
    '''The first.'''

wordrun.register("optimizer", "noted", NotedConfig, dict)
before = wordrun.compose(["data=sample", "optimizer=noted", "optimizer.first=3"]).optimizer.first

@dataclass
class NotedConfig(OptimizerConfig):
    second: int = 2
    '''The second.'''

wordrun.register("optimizer", "noted", NotedConfig, dict)
print(before, wordrun.compose(["data=sample", "optimizer=noted", "optimizer.second=4"]).optimizer.second)
"""


@pytest.mark.parametrize("where", ["a file", "standard input"])
def test_a_class_without_a_file_and_the_second_one_of_its_name(where: str, command: Command, tmp_path: Path) -> None:
    """Of a program from standard input, as of a notebook's cell, Python does not know the source."""
    (tmp_path / "twice.py").write_text(TWICE)
    if where == "a file":
        done = command(sys.executable, "twice.py")
    else:
        done = command("bash", "-c", f"{shlex.quote(sys.executable)} - < twice.py")
    assert (done.stdout, done.stderr) == ("3 4\n", "")


WRONG = {
    "no dataclass": ("@dataclass\n", "", "RpropConfig is not a dataclass"),
    "no base": ("(OptimizerConfig)", "", "RpropConfig does not derive from wordrun.config.OptimizerConfig"),
    "no type": ("eta: float = 0.5", "eta = 0.5", "RpropConfig.eta has no type: write eta: TYPE"),
    "no text": ('    """Factor by which a step shrinks."""\n', "", "RpropConfig.eta has no documentation"),
    "literal": (
        "eta: float = 0.5",
        "import typing; eta: typing.Literal['a', 'b'] | None = 'a'",
        "RpropConfig.eta has the type Literal['a', 'b'], which options cannot have: write str, and check the value in "
        "problems()",
    ),
    "enum": (
        "eta: float = 0.5",
        "import enum; eta: enum.Enum('Act', 'RELU GELU') = None",
        "RpropConfig.eta has the type Act, which a checkpoint cannot hold: write str, and check the value in problems(",
    ),
    "path": (
        "eta: float = 0.5",
        "import pathlib; eta: list[pathlib.Path] = None",
        "RpropConfig.eta has the type Path, which a checkpoint cannot hold: write str, and call Path where it is used",
    ),
    "no such type": ("eta: float = 0.5", "eta: set = None", "eta: "),
    "no default": ("eta: float = 0.5", "eta: float", "my_rprop.py, line 9)"),
    "no syntax": ("def rprop(", "def rprop((", "SyntaxError: "),
    "no module": ("import torch", "import torhc", "ModuleNotFoundError: No module named 'torhc' ("),
    "exit": ("import torch", "raise SystemExit('no licence')", "SystemExit: no licence ("),
    "no class": ("class RpropConfig", "class RpropOptions", "has no RpropConfig"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_part_with_a_mistake_is_named_with_its_file(case: str, make: Make) -> None:
    old, new, expected = WRONG[case]
    assert old in OPTIMIZER
    make(MINE | {"my_rprop.py": OPTIMIZER.replace(old, new)})
    wordrun.compose(["data=sample"])  # it is not chosen
    message = refusal("optimizer=rprop", "train.max_iters=0")
    assert "optimizer=rprop (my_rprop): " in message
    assert expected in message
    assert "hydra" not in message.lower()


MODEL = """
from dataclasses import dataclass
from wordrun.config import DataConfig, ModelConfig

@dataclass
class PointsConfig(DataConfig):
    pass

@dataclass
class LineConfig(ModelConfig):
    degree: int = 1
"""


def test_nothing_is_said_about_the_default_in_place_of_a_part_with_a_mistake(make: Make) -> None:
    registered = 'import wordrun\nwordrun.register("model", "line", "my_model:LineConfig", "builtins:dict")\n'
    registered += 'wordrun.register("data", "points", "my_model:PointsConfig", "builtins:dict")\n'
    make({"wordrun.yaml": "module: my_parts", "my_parts.py": registered, "my_model.py": MODEL})
    for word, expected in {
        "model=line": "LineConfig.degree has no documentation",
        "model=lien": "model=lien: unknown model; did you mean 'line'?",
    }.items():
        with pytest.raises(ConfigError) as caught:
            wordrun.compose([word, "data=points", "train.max_iters=0"])
        assert expected in str(caught.value)
        assert "train.max_iters=0 should be at least 1" in str(caught.value)
        assert "cannot train" not in str(caught.value)
    with pytest.raises(ConfigError, match="model=modern cannot train on data=points"):
        wordrun.compose(["data=points"])


REGISTRATIONS = {
    "kind": ('"optimizer"', '"optimiser"', "unknown kind of part; did you mean 'optimizer'?"),
    "taken": ('"rprop"', '"sgd"', "the name is taken by optimizer=sgd (part of wordrun)"),
    "preset": ('"optimizer", "rprop"', '"model", "nano"', "the name is taken by a preset of wordrun's; choose another"),
    "case": ('"rprop"', '"Rprop"', "use lower-case letters"),
    "no colon": (':rprop"', '"', "'my_rprop' should be 'package.module:Name'"),
    "raises": ("import wordrun", "import wordrun, torhc", "cannot import my_parts: ModuleNotFoundError"),
}


@pytest.mark.parametrize("case", REGISTRATIONS)
def test_a_registration_with_a_mistake_is_named_with_its_file(case: str, make: Make) -> None:
    old, new, expected = REGISTRATIONS[case]
    folder = make(MINE | {"my_parts.py": MINE["my_parts.py"].replace(old, new)})
    for _ in range(2):  # again, the same
        assert f"{folder}/my_parts.py" in (message := refusal())
        assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modul: my_parts", "unknown key 'modul'; did you mean 'module'?"),
        ("module: [a, b]", "should be the name of a module"),
        ("- my_parts", "expected KEY: VALUE"),
        ("module: {", "wordrun.yaml: while parsing"),
        ("module: my_prats", "cannot import my_prats: ModuleNotFoundError"),
    ],
)
def test_a_declaration_with_a_mistake_is_named(text: str, expected: str, make: Make) -> None:
    folder = make(MINE | {"wordrun.yaml": text})
    assert expected in (message := refusal())
    assert f"{folder}/wordrun.yaml" in message


def test_a_folders_config_files_are_added_to_wordruns(make: Make) -> None:
    folder = make(
        {
            "conf/model/small.yaml": "defaults:\n  - gpt2\n\nname: small\nn_layer: 2\n",
            "conf/optimizer/slow.yaml": "defaults:\n  - rprop\n\neta: 0.125\n",
            "conf/experiment/mine.yaml": (
                "# @package _global_\n# My run.\ndefaults:\n  - override /model: small\n  - override /optimizer: slow\n"
            ),
            **MINE,
        }
    )
    cfg = wordrun.compose(["data=sample", "experiment=mine", "model.n_head=4"])
    assert (cfg.model.n_layer, cfg.model.n_embd, cfg.model.n_head, cfg.model.name) == (2, 768, 4, "small")
    assert (cfg.optimizer.eta, cfg.optimizer.name) == (0.125, "rprop")  # type: ignore[attr-defined]
    (folder / "conf" / "model" / "gpt2.yaml").write_text("name: mine")
    assert refusal() == f"{folder}/conf/model/gpt2.yaml: model=gpt2 is one of wordrun's own: rename the file"


def test_all_mistakes_of_a_projects_registrations_are_reported_at_once(make: Make) -> None:
    lines = [
        'wordrun.register("optimiser", "one", "a:B", "c:d")',
        'wordrun.register("optimizer", "Two", "a:B", "c:d")',
        'wordrun.register("optimizer", "rprop", "my_rprop:RpropConfig", "my_rprop:rprop")',
        'wordrun.register("model", "gpt", "a:B", "c:d")',
    ]
    folder = make({**MINE, "my_parts.py": "\n".join(["import wordrun", *lines])})
    for _ in range(2):  # also when it is asked again
        found = refusal().splitlines()
        assert [line.partition(" (")[0] for line in found] == [
            f"{folder}/my_parts.py: {part}" for part in ("optimiser=one", "optimizer=Two", "model=gpt")
        ]


HOOKS = '''
from dataclasses import dataclass

from wordrun.config import HookConfig


@dataclass
class UntypedConfig(HookConfig):
    """Has an option without a type."""

    size = 3


@dataclass
class SilentConfig(HookConfig):
    """Has an option without documentation."""

    size: int = 3


@dataclass
class AskingConfig(HookConfig):
    """Cannot say what is wrong with it."""

    def problems(self):
        return self.nothing
'''


def test_all_mistakes_in_the_options_of_hooks_are_reported_at_once(make: Make) -> None:
    names = ("untyped", "silent", "asking")
    lines = [f'wordrun.register("hooks", "{n}", "my_hooks:{n.title()}Config", "my_hooks:{n}")' for n in names]
    make({**MINE, "my_parts.py": "\n".join(["import wordrun", *lines]), "my_hooks.py": HOOKS})
    found = refusal("hooks=[untyped,silent]", "hooks.silent.size=2", "train.max_iters=0").splitlines()
    assert sorted(found) == [
        'hooks=silent (my_hooks): SilentConfig.size has no documentation: write a """line""" under it',
        "hooks=untyped (my_hooks): UntypedConfig.size has no type: write size: TYPE = ...",
        "train.max_iters=0 should be at least 1",
    ]
    assert refusal("hooks=[asking]", "train.max_iters=0").splitlines() == [
        "train.max_iters=0 should be at least 1",
        "hooks=asking (my_hooks): AskingConfig.problems failed: AttributeError: 'AskingConfig' object "
        "has no attribute 'nothing' (my_hooks.py:26)",
    ]


def test_an_unknown_name_in_a_list_is_named_in_the_singular() -> None:
    assert refusal("hooks=[emaa]").startswith("hooks=[emaa]: unknown hook 'emaa'; did you mean 'ema'?")
    assert refusal("metrics=[acuracy]").startswith("metrics=[acuracy]: unknown metric 'acuracy'; did you mean 'accura")


def test_a_project_is_found_from_the_folders_below_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make({**MINE, "conf/experiment/first.yaml": EXPERIMENT, "deep/er/notes.txt": ""})
    monkeypatch.chdir(folder / "deep" / "er")
    cfg = wordrun.compose(["experiment=first", "optimizer=rprop"])
    assert (cfg.optimizer.name, cfg.train.max_iters) == ("rprop", 7)


EXPERIMENT = "# @package _global_\ndefaults:\n  - override /data: sample\n\ntrain:\n  max_iters: 7\n"


def test_a_projects_own_root_of_the_config_is_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make({**MINE, "conf/config.yaml": "train:\n  max_iters: 7\n"})
    assert wordrun.compose(["data=sample"]).train.max_iters != 7
    (line,) = caplog.messages
    assert "conf/config.yaml is not read" in line
    assert "experiment=NAME" in line


def test_a_checkout_of_wordrun_is_no_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert project.here().conf is None


def test_wordruns_own_parts_load() -> None:
    own = [part for kind in KINDS for part in parts(kind).values() if not part.origin]
    assert len(own) > 25
    assert [part for part in own if part.kind != "backend" and not callable(part.load())] == []
    assert type(wordrun.compose(["optimizer=sgd", "data=sample"]).optimizer) is SGDConfig
