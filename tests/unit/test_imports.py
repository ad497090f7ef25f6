"""Imports go one way, are cheap where they have to be, and do nothing."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import wordrun

if TYPE_CHECKING:
    from conftest import Command

SOURCE = Path(wordrun.__file__).parent
MODULES = sorted(
    ".".join(("wordrun", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
)
# From the lowest to the highest; a module imports its own layer and lower ones. Those in a line do not import each
# other, except TOGETHER.
LAYERS = (
    ("common",),
    ("options",),
    ("config",),
    ("launch", "dist"),
    ("model", "data", "track"),
    ("checkpoint",),
    ("backend",),
    ("plan",),
    ("train",),
    ("attached",),
    ("study", "commands"),
    ("entry",),
)
TOGETHER = ({"study", "commands"},)
HEIGHT = {name: height for height, line in enumerate(LAYERS) for name in line}
# Options, and the arithmetic and settings that they need, are free of torch, wherever they stand.
OPTIONS = {
    "wordrun.dist.mesh",
    "wordrun.backend.deepspeed.settings",
    *(
        f"wordrun.{room}.options"
        for room in tuple(
            shlex.split("""
        model data data.tokenizers backend backend.deepspeed backend.diloco train train.optim
        train.hooks track
    """)
        )
    ),
}
# Parts that bring their own estimates, which the plan loads by the name that their options give.
ESTIMATES = {"wordrun.backend.deepspeed.estimates", "wordrun.backend.diloco.estimates"}
# Rare machinery, which stands above what it attaches to.
ATTACHED = ("wordrun.checkpoint.memory", "wordrun.launch.elastic")
ENTRIES = {"wordrun.api", "wordrun.cli", "wordrun.__main__", "wordrun.launch.__main__"}
# Imports that go up nevertheless.
UPWARD = {
    # A guardian imports what the command that it forks will import.
    ("wordrun.launch.elastic.guardian", "wordrun.commands.train"),
}
# Packages that offer names of their modules lazily.
LAZY = set(
    shlex.split("""
    wordrun wordrun.config wordrun.model wordrun.backend wordrun.track wordrun.train.hooks
    wordrun.data.tokenizers
""")
)


def layer(module: str) -> str:
    """Return the layer of a module."""
    if module in ENTRIES or module == "wordrun":
        return "entry"
    if module == "wordrun._version":
        return "common"
    if module == "wordrun.test_dist":
        return "commands"
    if module in OPTIONS:
        return "options"
    if module in ESTIMATES:
        return "plan"
    if module.startswith(ATTACHED):
        return "attached"
    return module.split(".")[1]


def nodes_of(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(file.read_text())))


@functools.cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements of a file."""
    return [node for node in nodes_of(file) if isinstance(node, ast.Import | ast.ImportFrom)]


def file_of(module: str) -> Path:
    """Return the file of a module."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module_of(name: str) -> str:
    """Return the module that a dotted name is or belongs to."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imported(module: str) -> Iterator[str]:
    """Yield the wordrun modules that ``module`` imports, at its top or anywhere else, also those it names in strings.

    Not walked are what a lazy package offers, targets such as ``module:Class``, which parts load when they are built,
    and what follows -m in a command.
    """
    file, nodes = file_of(module), nodes_of(file_of(module))
    if module in LAZY:
        return
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            yield from (module_of(alias.name) for alias in node.names if alias.name.split(".")[0] == "wordrun")
        elif node.level:
            raise AssertionError(f"{file}:{node.lineno}: a relative import, which this test does not follow")
        elif str(node.module).split(".")[0] == "wordrun":
            yield from (module_of(f"{node.module}.{alias.name}") for alias in node.names)
    commands = {
        id(word)
        for node in nodes
        if isinstance(node, ast.List | ast.Tuple)
        for flag, word in pairwise(node.elts)
        if isinstance(flag, ast.Constant) and flag.value == "-m"
    }
    own = module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in commands:
            text = node.value
            if re.fullmatch(r"wordrun(\.\w+)+", text) and not (module in OPTIONS and text.startswith(f"{own}.")):
                yield module_of(text)


def test_imports_go_one_way() -> None:
    assert MODULES
    wrong = set()
    for module in MODULES:
        mine = layer(module)
        for name in set(imported(module)) - {module, "wordrun"}:
            theirs = layer(name)
            beside = HEIGHT[mine] == HEIGHT[theirs] and mine != theirs and {mine, theirs} not in TOGETHER
            if HEIGHT[theirs] > HEIGHT[mine] or beside:
                wrong.add((module, name))
    assert wrong - UPWARD == set()
    assert UPWARD - wrong == set(), "no longer needed"


def test_no_two_modules_import_each_other() -> None:
    """Neither in functions nor for type checking: a circle of modules can only be understood as a whole."""

    def edges(module: str) -> set[str]:
        names = {
            f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in MODULES else str(node.module)
            for node in imports_of(file_of(module))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        return names & set(MODULES) - {module}

    graph = {module: edges(module) for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("library", ["hydra", "omegaconf"])
def test_no_private_name_of_a_config_library_is_used(library: str) -> None:
    """A new version may rename them; composer.py and commands/train.py use what is documented."""
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(rf"\b{library}(\.\w+)*\._|\._get_(node|value|flag|child)\b", line)
    ]
    assert found == []


def test_the_walk_sees_the_imports_that_are_there() -> None:
    edges = {(module, name) for module in MODULES for name in imported(module)}
    assert {
        ("wordrun.commands.train", "wordrun.config.compose"),
        ("wordrun.train.task", "wordrun.backend.base"),
        ("wordrun.cli", "wordrun.commands.train"),
    } <= edges


# What starts quickly, or before torch, must not import it; launch has no need of Hydra and NumPy either.
LIGHT = {
    "wordrun": ("torch", "mpi4py", "hydra", "omegaconf", "numpy", "wandb", "matplotlib", "rich"),
    "wordrun.launch.cli": ("torch", "mpi4py", "hydra", "omegaconf", "numpy", "wandb", "matplotlib"),
    "wordrun.launch.run": ("torch", "mpi4py", "hydra", "omegaconf", "numpy", "wandb", "matplotlib"),
    "wordrun.config": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.common.log": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.dist": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.config.compose": ("torch", "mpi4py", "numpy", "wandb", "matplotlib"),
    "wordrun.cli": ("torch", "mpi4py", "hydra", "omegaconf", "numpy", "wandb", "matplotlib"),
    "wordrun.commands.train": ("torch", "mpi4py", "numpy", "wandb", "matplotlib"),
    "wordrun.test_dist": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.commands.generate": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.commands.export": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.commands.prepare": ("torch", "mpi4py", "wandb", "matplotlib"),
    "wordrun.data.prepare.workers": ("torch", "mpi4py", "hydra", "wandb", "matplotlib"),
    "wordrun.commands.ls": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.commands.tail": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.commands.report": ("torch", "mpi4py", "hydra", "numpy", "wandb", "matplotlib"),
    "wordrun.commands.plan": ("torch", "mpi4py", "numpy", "wandb", "matplotlib"),
}


@pytest.mark.parametrize("module", LIGHT)
def test_what_has_to_be_light_is(module: str, command: Command) -> None:
    script = f"import sys, {module}; print(*[name for name in {LIGHT[module]!r} if name in sys.modules])"
    done = command(sys.executable, "-c", script)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_importing_everything_does_nothing(command: Command, tmp_path: Path) -> None:
    # What the libraries do when imported is not ours, so they come first.
    script = f"""
import importlib, logging, os, random, signal, threading
import hydra, matplotlib.figure, numpy, rich.logging, rich.progress
import torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.tensor.parallel, torch.nn.parallel

def surroundings():
    loggers = [logging.getLogger(), logging.getLogger("wordrun")]
    return {{
        "cwd": os.getcwd(), "env": dict(os.environ), "threads": threading.active_count(),
        "handlers": [list(logger.handlers) for logger in loggers], "levels": [logger.level for logger in loggers],
        "group": torch.distributed.is_initialized(), "random": random.getstate(),
        "torch": torch.get_rng_state().tolist(), "numpy": str(numpy.random.get_state()),
        "interrupt": signal.getsignal(signal.SIGINT), "terminate": signal.getsignal(signal.SIGTERM),
    }}

before = surroundings()
for name in {[name for name in MODULES if not name.endswith("__main__")]!r}:
    importlib.import_module(name)
after = surroundings()
print([key for key in before if before[key] != after[key]])
"""
    done = command(sys.executable, "-c", script)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert list(tmp_path.iterdir()) == []


# Set on objects of libraries, which offer no other way.
OF_LIBRARIES = set(
    shlex.split("""
    forward grad weight reducer logger hydra pre_tokenizer decoder initialize finalize
    environ stderr argv returncode msg has_rank propagate filename path HF_HUB_OFFLINE
    dtypes fill_uninitialized_memory benchmark __class__
    _compiled_call_impl
""")
)


def test_nothing_sets_an_attribute_of_another_modules_object() -> None:
    """Whoever wants another module's object changed calls a method of it."""
    foreign = []
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = nodes_of(path)
        own = {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        changed = [node for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)]
        foreign += [
            f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
            for node in changed
            if node.attr not in own | OF_LIBRARIES
            and ast.unparse(node.value) not in ("self", "cls", "LogHandle", "ctx")
        ]
    assert foreign == []


RARE = ("backend.deepspeed", "backend.diloco", "checkpoint.memory")
"""Rooms that attach from outside: only lines with a target, such as those of config/parts.py, name them."""


def test_rare_rooms_attach_from_outside(command: Command) -> None:
    """Without their folders, everything else works."""
    for name in RARE:
        users = {module for module in MODULES for each in imported(module) if each.startswith(f"wordrun.{name}")}
        assert {module for module in users if not module.startswith(f"wordrun.{name}")} == set()
    copied = Path("copied/wordrun").absolute()
    shutil.copytree(SOURCE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for name in RARE:
        shutil.rmtree(copied.joinpath(*name.split(".")))
    check = f"import wordrun; assert wordrun.__file__.startswith({str(copied)!r})"
    train = "import sys; from wordrun.cli import main; sys.exit(main())"
    words = ["data=sample", "train=smoke", "train.max_iters=2"]
    done = command(sys.executable, "-c", f"{check}\n{train}", *words, PYTHONPATH=str(copied.parent))
    assert done.returncode == 0, done.stderr
    assert len(list(Path("outputs").glob("sample/*/*/checkpoints/step-*"))) == 1


def test_ranks_start_without_guardians(command: Command, tmp_path: Path) -> None:
    """``launch/elastic/`` attaches from outside: only one name in a table leads to it."""
    users = {module for module in MODULES for each in imported(module) if ".launch.elastic" in each}
    assert {module for module in users if ".launch.elastic" not in module} == set()
    copied = tmp_path / "copied" / "wordrun"
    shutil.copytree(SOURCE, copied, ignore=shutil.ignore_patterns("elastic", "__pycache__"))
    check = f"import wordrun; assert wordrun.__file__.startswith({str(copied)!r})"
    launch = f"{check}\nimport sys; from wordrun.launch.cli import main; sys.exit(main())"
    rank = f"{check}; import os; print('rank', os.environ['RANK'])"
    words = ["-n", "2", sys.executable, "-c", rank]
    done = command(sys.executable, "-c", launch, *words, PYTHONPATH=str(copied.parent))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0", "rank 1"]
