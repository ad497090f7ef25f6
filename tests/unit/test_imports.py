"""Imports go one way, are cheap where they have to be, and do nothing."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
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
# Which layers a layer may use, besides itself. The design: log <- dist <- config <- data, model, track <- backend
# <- train <- cli, and log <- launch <- cli.
BASE = {
    "version", "errors", "synonyms", "files", "ends", "stack_requests", "cgroup", "interrupts", "slurm", "ports",
    "run_id", "listener", "log",
}  # fmt: skip
CONFIG = BASE | {
    "dist", "project", "registry", "sections", "config", "config_images", "validation", "ds_config", "layouts",
    "checks", "refusals", "composer",
}  # fmt: skip
PARALLEL = CONFIG | {"data", "model", "track"}
MAY_USE: dict[str, set[str]] = {
    "version": {"_version"},
    "_version": set(),
    "synonyms": set(),
    "errors": {"synonyms"},
    "files": set(),
    "ends": set(),
    "stack_requests": set(),
    "cgroup": {"files"},
    "interrupts": set(),
    "devices": set(),
    "kernels": set(),
    "heap": set(),
    "validation": {"errors"},
    "slurm": {"errors"},
    "ports": set(),
    "run_id": set(),
    "listener": set(),
    "log": {"errors"},
    "project": {"errors"},
    "option_types": set(),
    "registry": {"errors", "option_types", "project"},
    "parts": {"registry"},
    "flight_recorder": set(),
    "dist": BASE | {"registry", "flight_recorder"},
    "sections": {"validation"},
    "config_images": {"sections", "validation"},
    "config": {"errors", "sections", "validation", "registry", "synonyms"},
    "ds_config": {"errors", "config"},
    "choices": {"validation", "registry", "config"},
    "layouts": {"errors", "dist", "config"},
    "checks": {"errors", "choices", "dist", "config", "ds_config", "layouts", "registry"},
    "part_source": {"errors", "project", "registry", "config"},
    "refusals": {"errors", "synonyms", "registry", "config"},
    "composer": BASE | {"project", "registry", "config", "part_source", "checks", "checkpoint", "refusals"},
    "launch": BASE,
    "data": CONFIG,
    "model": CONFIG | {"compat", "compat_experts", "compat_vision", "kernels"},
    "track": CONFIG | {"runs"},
    "runs": {"files", "errors", "log", "sections", "validation", "arguments"},
    "report": {"errors", "files", "sections", "arguments", "config", "composer", "track", "runs", "version"},
    "compat": {"errors"},
    "compat_experts": set(),
    "compat_vision": {"errors"},
    "compat_deepspeed": {"errors"},
    "checkpoint": {"errors", "files", "cgroup", "log", "dist", "config", "model", "compat", "compat_deepspeed"},
    "backend": PARALLEL | {"checkpoint", "compat", "compat_deepspeed", "heap"},
    "prepare": CONFIG | {"data", "compat_vision"},
    # A run that cannot fit is refused, by the plan's estimate.
    "train": PARALLEL
    | {"checkpoint", "backend", "prepare", "plan", "devices", "arguments", "compat", "runs", "report"},
    "bandwidth": PARALLEL | {"version", "compat"},
    "test_dist": PARALLEL | {"bandwidth"},
    "probe": PARALLEL,
    "arguments": {"errors", "registry", "config", "synonyms"},
    "new": {"errors", "files", "registry"},
    "generate": PARALLEL | {"arguments", "checkpoint", "backend", "chat"},
    "chat": {"errors", "interrupts", "config", "data"},
    "export": PARALLEL | {"arguments", "checkpoint", "backend"},
    "plan": PARALLEL | {"choices", "arguments", "backend", "launch", "devices", "kernels"},
    "study": PARALLEL | {"interrupts", "launch", "plan", "prepare", "runs", "train"},
    "completion": {"errors", "project", "registry", "config", "launch", "train"},
    "cli": {"ends", "errors", "dist", "interrupts", "version", "completion", "synonyms"},
    "__main__": {"cli", "interrupts"},
    "loading": PARALLEL | {"checkpoint"},
    "": {"composer", "loading", "registry", "train", "version"},
}


def layer(module: str) -> str:
    """Return the part of a module's name that places it: ``dist`` for ``wordrun.dist.world``."""
    return f"{module}.".split(".")[1]


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


def imported(module: str) -> Iterator[str]:
    """Yield the wordrun modules that the text of ``module`` imports, at its top or anywhere else."""
    file = file_of(module)
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "wordrun")
        elif node.level:
            raise AssertionError(f"{file}:{node.lineno}: a relative import, which this test does not follow")
        elif node.module == "wordrun":
            yield from (f"wordrun.{alias.name}" for alias in node.names)
        elif str(node.module).startswith("wordrun."):
            yield str(node.module)


def test_imports_go_one_way() -> None:
    assert MODULES
    wrong = {
        module: layers for module in MODULES
        if (layers := {layer(name) for name in imported(module)} - {layer(module), ""} - MAY_USE[layer(module)])
    }  # fmt: skip
    assert wrong == {}


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
    edges = {(layer(module), layer(name)) for module in MODULES for name in imported(module)}
    assert {("train", "composer"), ("train", "backend"), ("backend", "dist"), ("dist", "errors")} <= edges


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
OF_LIBRARIES = {
    "forward", "grad", "weight", "reducer", "logger", "hydra", "pre_tokenizer", "decoder", "initialize", "finalize",
    "environ", "stderr", "argv", "returncode", "msg", "has_rank", "propagate", "filename", "HF_HUB_OFFLINE",
    "dtypes", "fill_uninitialized_memory", "benchmark", "__class__",
    "_compiled_call_impl",
}  # fmt: skip


def test_nothing_sets_an_attribute_of_another_modules_object() -> None:
    """Whoever wants another module's object changed calls a method of it."""
    foreign = []
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = nodes_of(path)
        own = {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        changed = [node for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)]
        foreign += [
            f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}" for node in changed
            if node.attr not in own | OF_LIBRARIES
            and ast.unparse(node.value) not in ("self", "cls", "LogHandle", "ctx")
        ]  # fmt: skip
    assert foreign == []
