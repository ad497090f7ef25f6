"""Hints about a run: commands to paste for what can be done next, devices that it leaves unused, and slow layouts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from wordrun.checkpoint.folder import all_in
from wordrun.common.errors import UserError
from wordrun.config.registry import part_of
from wordrun.config.schema import Config
from wordrun.dist.mesh import Layout
from wordrun.model.options import ModelConfig, TransformerConfig
from wordrun.plan.parameter_shapes import ModelShapes
from wordrun.plan.strategy import Strategy
from wordrun.plan.traffic import context_traffic


def own_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of this process, which ends with ``arguments``, as the user would type it."""
    words, count = sys.orig_argv, len(arguments)
    start = words[: len(words) - count]
    if not start or words[len(start) :] != list(arguments):  # called by another program
        start = ["wordrun"]
    elif len(start) > 1 and os.path.basename(start[1]) == "wordrun":  # the console script, run by its interpreter
        start = ["wordrun" if shutil.which("wordrun") else start[1], *start[2:]]
    return [*start, *arguments]


def by_launch() -> bool:
    """Return whether ``launch`` has started this process."""
    return "WORDRUN_LAUNCH_RECORD" in os.environ


def unused(command: Sequence[str], devices: int, env: Mapping[str, str]) -> str:
    """Return a hint if the job has nodes or devices that this single process does not use; else an empty string.

    Args:
        command: the command line of this process, which nothing has launched.
        devices: the accelerators that it sees.
        env: its environment.
    """
    nodes, nodefile = 1, Path(env.get("PBS_NODEFILE", ""))
    if "SLURM_JOB_ID" in env:
        nodes = int(count) if (count := env.get("SLURM_NNODES", "")).isdigit() else 1
    elif "PBS_JOBID" in env:
        nodes = len(set(nodefile.read_text().split())) if nodefile.is_file() else 1
    else:
        return ""
    if nodes < 2 and devices < 2:
        return ""
    has = [f"{nodes} nodes"] * (nodes > 1) + [f"{devices} devices{' each' * (nodes > 1)}"] * (devices > 1)
    uses = f"this run uses one {'device' if devices > 1 else 'node'}"
    return f"this job has {' with '.join(has)}, and {uses}; to use all:\n  {shlex.join(['launch', *command])}"


def launched(command: Sequence[str], run_dir: Path, ranks: int) -> list[str]:
    """Return ``command`` as it was started on all ``ranks``: by ``launch``, if it has left a record in ``run_dir``."""
    if by_launch():
        try:
            return [*json.loads((run_dir / "launch.json").read_text(encoding="utf-8"))["launch"], *command]
        except (OSError, ValueError, KeyError, TypeError):
            pass
    return [*(["launch", "-n", str(ranks)] if ranks > 1 else []), *command]


def setting(key: str, path: Path) -> str:
    """Return ``key=path`` for Hydra, which needs quotes around unusual characters."""
    return f"{key}={path}" if re.fullmatch(r"[\w./+@:-]+", str(path), re.ASCII) else f'{key}="{path}"'


def resume_command(source: Path, run_dir: Path, command: Sequence[str], ranks: int, *more: str) -> str:
    """Return the command line that continues the run in ``source``; without ``command``, only the options for it.

    Args:
        source: the run to continue.
        run_dir: directory of this run, which has ``launch``'s record.
        command: the command line that started each rank of this run; empty: it was started from Python.
        ranks: number of ranks.
        more: further options, which replace those in ``command``.
    """
    options = [*more, setting("train.resume", relative(source))]
    if not command:
        return f"the same options, with {' '.join(options)}"
    keys = {option.partition("=")[0] for option in options}
    if not any(word.lstrip("+").startswith("model.lora_rank=") for word in command):  # LoRA always needs its base
        keys.add("train.init_from")
    if source != run_dir:  # with a directory of its own, it would be a branch of ``source``
        keys.add("hydra.run.dir")
    kept = [word for word in command if word.partition("=")[0].lstrip("+") not in keys]
    return shlex.join(launched([*kept, *options], run_dir, ranks))


def next_steps(
    run_dir: Path,
    command: Sequence[str],
    ranks: int,
    max_iters: int,
    *,
    finished: bool,
    huggingface: bool = True,
    generates: bool = True,
) -> str:
    """Return what can be done next with the run in ``run_dir``; an empty string if it has no checkpoint.

    Args:
        run_dir: the run directory.
        command: the command line that started each rank; empty: the run was started from Python, or is complete.
        ranks: number of ranks.
        max_iters: the step at which it ends.
        finished: whether it has ended there, without an error.
        huggingface: whether model and tokenizer can be exported in Hugging Face format.
        generates: whether it can generate text.
    """
    checkpoints = all_in(run_dir)
    if not checkpoints:
        return ""
    if not finished:
        if checkpoints[-1].step >= max_iters:  # it failed after its last step: nothing is left to do
            return ""
        again = resume_command(run_dir, run_dir, command, ranks)
        return f"to continue from step {checkpoints[-1].step}:\n  {again}"
    wordrun = shlex.join(_program(command))
    quoted = shlex.quote(str(relative(run_dir)))
    steps = {"generate text": f"{wordrun} generate run={quoted}"} if generates else {}
    steps["export the model"] = f"{wordrun} export run={quoted}{'' if huggingface else ' form=checkpoint'}"
    if command:
        steps["train further"] = resume_command(run_dir, run_dir, command, ranks, f"train.max_iters={2 * max_iters}")
    return "\n  ".join([f"next: {', '.join(steps)}", *steps.values()])


def has_huggingface_format(cfg: ModelConfig) -> bool:
    """Return whether a model that was trained with ``cfg`` can be exported in Hugging Face format."""
    from wordrun.model.huggingface import architecture

    if getattr(part_of("model", cfg).load(), "has_huggingface_format", False):
        return True
    if not isinstance(cfg, TransformerConfig) or part_of("model", cfg).origin:
        return False
    try:
        architecture(cfg)
    except UserError:
        return False
    return not getattr(cfg, "balance_rate", 0.0)  # in that format, routers have no biases


def has_huggingface_tokenizer(saved: str | None) -> bool:
    """Return whether the tokenizer in a checkpoint can be exported in Hugging Face format; None: there is none."""
    from wordrun.data.tokenizers.huggingface import is_convertible

    return saved is not None and is_convertible(json.loads(saved))


def _program(command: Sequence[str]) -> Sequence[str]:
    """Return the words of ``command`` that start wordrun."""
    if os.path.basename(next(iter(command), "")) == "wordrun":
        return command[:1]
    modules = (end for end in range(2, len(command) + 1) if list(command[end - 2 : end]) == ["-m", "wordrun"])
    return command[: next(modules, 0)] or ["wordrun"]


def relative(path: Path) -> Path:
    """Return ``path`` relative to the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path


def spread_context(cfg: Config, at: Layout, per_node: int, model: ModelShapes | None) -> str:
    """Return a warning if ranks that share a sequence are on several nodes, which have ``per_node`` ranks each."""
    if at.cp == 1 or at.size <= per_node or per_node % (at.cp * at.tp) == 0 or model is None:
        return ""
    sent = sum(each.sent for each in context_traffic(model, Strategy("", cfg, at)))
    fits = [n for n in range(1, at.cp) if at.cp % n == 0 and per_node % (n * at.tp) == 0]
    return (
        f"backend.cp={at.cp} spans nodes, which have {per_node} ranks each: for attention, each rank sends "
        f"{sent / 2**20:.1f} MiB per step; backend.cp={fits[-1]} keeps the ranks of a sequence on one node"
    )
