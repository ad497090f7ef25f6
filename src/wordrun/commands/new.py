"""``wordrun new DIR``: write a small project with a model and data of its own, ready to train."""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from wordrun.common.errors import ConfigError, UserError, show
from wordrun.common.files import absolute
from wordrun.config.registry import WORDS, parts

USAGE = """\
Write a small project with its own model and data, ready to train.

  wordrun new my_project
  cd my_project
  launch -n 2 wordrun experiment=first

DIR's last part is the name of the project and of its package. See docs/extend.md.
"""

FILES = {
    "README.md": """\
# {name}

A model and data for wordrun, added without changing wordrun.

```console
launch -n 2 wordrun experiment=first                      # on this machine
launch -n 2 wordrun experiment=first train.backend=FSDP   # any backend
wordrun --help experiment=first                           # its options, with their meaning
wordrun generate run=outputs/latest prompt="12+34="
python -m pytest                                          # tests
sbatch job.sh                                             # or qsub job.sh; `launch --submit` writes one for your site
```

This folder works without being installed. `pip install -e .` makes its parts available in every folder; install wordrun
in that environment first (docs/install.md in its repository), because pip would not find it on PyPI yet.

| file | contents |
|---|---|
| `src/{name}/parts.py` | the names of the parts |
| `src/{name}/model.py` | a model and its options |
| `src/{name}/data.py` | a source of data and its options |
| `conf/experiment/first.yaml` | the settings of the first experiment; `conf/model/NAME.yaml` would be a preset |
""",
    "pyproject.toml": """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = ["wordrun"] # install it first: it is not on PyPI yet

[project.entry-points.wordrun] # how wordrun finds the parts once this package is installed,
{name} = "{name}.parts"

[tool.wordrun] # and in this folder, installed or not
module = "{name}.parts"

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
pythonpath = ["src"]
""",
    ".gitignore": "outputs/\n__pycache__/\n*.egg-info/\n",
    "job.sh": """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --time=00:30:00
#PBS -l select=1
#PBS -l walltime=00:30:00
# In this folder: sbatch job.sh (SLURM), qsub job.sh (PBS) or bash job.sh (a laptop); one rank for each device.
# Add what your site asks for above, such as an account, a queue and GPUs.
export PATH={path}:"$PATH" # the environment with wordrun, which PBS does not pass on
cd "${{PBS_O_WORKDIR:-.}}" || exit 1
launch wordrun experiment=first "$@"
""",
    "conf/experiment/first.yaml": """\
# @package _global_
# Sums of two numbers: the loss falls below 1 in a minute on two cores.
defaults:
  - override /model: {name}
  - override /data: {name}
  - override /tracker: jsonl

model:
  n_layer: 2
  block_size: 32
train:
  max_iters: 500
  sample_prompt: "12+34="
""",
    "src/{name}/__init__.py": '"""A model and data for wordrun."""\n',
    "src/{name}/parts.py": '''\
"""The parts of this package, named by strings: each is imported when it is chosen."""

import wordrun

wordrun.register("model", "{name}", "{name}.model:SquaredConfig", "{name}.model:Squared")
wordrun.register("data", "{name}", "{name}.data:SumsConfig", "{name}.data:Sums")
''',
    "src/{name}/model.py": '''\
"""A GPT whose MLPs use the square of ReLU."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from wordrun.config import GPTConfig
from wordrun.model import GPT
from wordrun.model.gpt import Attention
from wordrun.model.block import Block


@dataclass
class SquaredConfig(GPTConfig):
    """A GPT whose MLPs use the square of ReLU."""

    expansion: int = 4
    """Hidden units of an MLP, as a multiple of n_embd."""

    def problems(self):
        """Return what is wrong with these options."""
        yield from super().problems()
        if self.expansion < 1:
            yield f"model.expansion={{self.expansion}} should be at least 1"


class SquaredMLP(nn.Module):
    """Two linear layers with the square of ReLU between them."""

    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.n_embd, cfg.expansion * cfg.n_embd, bias=cfg.bias)
        self.proj = nn.Linear(cfg.expansion * cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        """Transform each token."""
        return self.proj(F.relu(self.up(x)).square())


class Squared(GPT):
    """A GPT with these MLPs."""

    def new_block(self):
        """Return one block."""
        return Block(self.new_norm(), Attention(self.cfg), self.new_norm(), SquaredMLP(self.cfg))
''',
    "src/{name}/data.py": '''\
"""Sums of two numbers, as text."""

import random
from dataclasses import dataclass

from wordrun.config import TextConfig
from wordrun.data.prepare.sources.base import Document, Source, WorkItem


@dataclass
class SumsConfig(TextConfig):
    """Sums of two numbers, one in each line."""

    most: int = 99
    """The largest number to add."""


class Sums(Source):
    """The text, in work items that ranks and processes can read in any order."""

    @classmethod
    def locate(cls, data):
        """Return the source."""
        return cls(data, None, f"sums of numbers up to {{data.most}}")

    def size(self):
        """Return the size of the files that have to be read: there are none."""
        return 0

    def state(self):
        """Return a text that changes whenever the data do; they are then prepared again."""
        return f"sums {{self.data.most}}"

    def items(self):
        """Return the work items."""
        return [WorkItem(number, "sums") for number in range(self.data.most + 1)]

    def documents(self, item):
        """Yield the documents of one item."""
        numbers = range(self.data.most + 1)
        for n in random.Random(item.number).sample(numbers, len(numbers)):  # every tenth is for validation
            yield Document(f"{{item.number}}+{{n}}={{item.number + n}}\\n")
''',
    "tests/test_training.py": '''\
"""A few steps of the project's experiment."""

from pathlib import Path

import wordrun


def test_the_loss_falls(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    overrides = ["experiment=first", "model.n_layer=1", "train.max_iters=20", f"hydra.run.dir={{tmp_path}}/run"]
    with wordrun.Trainer(wordrun.compose(overrides)) as trainer:
        untrained = trainer.evaluate()
        assert trainer.train().val_loss < untrained
''',
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise ConfigError("wordrun new takes one folder: wordrun new DIR")
        folder = write(Path(arguments[0]))
    except UserError as error:
        return show(error)
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return UserError.exit_status
    print(f"Wrote {len(FILES)} files. Next:\n\n  cd {folder}\n  launch -n 2 wordrun experiment=first")
    return 0


def write(folder: Path) -> Path:
    """Write a project into ``folder``, which must not exist or be empty, and return it.

    Raises:
        ConfigError: it has files, or its name cannot be that of a Python package or of a part.
    """
    name = re.sub(r"\W", "_", absolute(str(folder)).name.lower())
    if not re.fullmatch(r"[a-z]\w*", name):
        raise ConfigError(f"{folder}: the package would be called '{name}': start the name with a letter")
    if keyword.iskeyword(name) or name in WORDS:
        what = "a keyword of Python" if keyword.iskeyword(name) else "a value for YAML or Hydra"
        raise ConfigError(f"{folder}: '{name}' is {what}: choose another name")
    if taken := [kind for kind in ("model", "data") if _is_wordruns(kind, name)]:
        raise ConfigError(f"{folder}: {taken[0]}={name} is one of wordrun's own: choose another name")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name):
        raise ConfigError(f"{folder}: there is a package called '{name}' already: choose another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder: choose another name")
    for path, text in FILES.items():
        file = folder / path.format(name=name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(name=name, path=shlex.quote(f"{sys.prefix}/bin")), encoding="utf-8")
    (folder / "job.sh").chmod(0o755)
    return folder


def _is_wordruns(kind: str, name: str) -> bool:
    """Return whether ``kind=name`` selects a part or a preset of wordrun's."""
    part, preset = parts(kind).get(name), importlib.resources.files("wordrun.conf") / kind / f"{name}.yaml"
    return bool(part and not part.origin) or preset.is_file()
