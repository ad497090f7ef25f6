"""``wordrun plan [plan.KEY=VALUE] [overrides]``: estimates memory from a config without starting anything."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from wordrun.common import errors, log
from wordrun.config.arguments import describe, parse
from wordrun.config.compose import compose
from wordrun.config.schema import Config
from wordrun.plan.devices import VARIANTS
from wordrun.plan.estimator import Estimator
from wordrun.plan.options import CPU, PlanConfig, hardware, ranks_for_launch
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.plan.recommendation import Advice, advise
from wordrun.plan.report import Report, as_json, show

USAGE = """\
Estimate the memory that a model needs per device under every backend, and recommend a backend.

  wordrun plan model=gpt2_xl train.dtype=bf16 plan.ranks=64 plan.device=a100-40
  wordrun plan model=llama3_8b plan.site=aurora plan.ranks=48
  wordrun plan model=gpt3_13b plan.ranks=16 train.backend=3D backend.pp=4 backend.tp=4 train.accumulation=16
  wordrun plan model=nano plan.device=cpu plan.ranks=2 plan.memory=8
  wordrun plan --json model=gpt2 plan.memory=12

It accepts the overrides of a training run (wordrun --help) and the options below. If train.backend or backend.* is set,
the first row is that strategy. No data is read and no device is used. See docs/plan.md for the columns.
"""
PRESETS = {"gpt2": (50257, "GPT-2's"), "gpt3": (50257, "GPT-2's, which GPT-3 also uses")}
"""Vocabulary sizes of model presets that do not set model.vocab_size, by name prefix."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    parser = argparse.ArgumentParser("wordrun plan", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args(argv)
    if args.help:
        print(_help())
        return 0
    try:
        report = plan(args.arguments)
    except errors.UserError as error:
        return errors.show(error)
    if args.json:
        print(as_json(report))
    else:
        show(log.console(), report)
    return 0


def plan(arguments: Sequence[str]) -> Report:
    """Return the plan for a command line.

    Raises:
        UserError: if an option is unknown or has an invalid value.
    """
    options, overrides = parse(PlanConfig, arguments, prefix="plan.")
    target = hardware(options)
    cfg = compose(overrides)
    if cfg.train.dtype in ("auto", "bf16"):
        dtype = "bf16" if target.bf16 else "fp32"  # same choice as in a run
        cfg = replace(cfg, train=replace(cfg.train, dtype=dtype))
    if cfg.train.float8 != "none" and not target.float8:
        raise errors.ConfigError(
            f"train.float8={cfg.train.float8} needs an NVIDIA GPU of the Ada or Hopper generation or later, which "
            f"plan.device={target.kind} is not: use train.float8=none, or another plan.device"
        )
    size, source = vocabulary(cfg)
    estimator = Estimator(cfg, shapes_of(cfg.model, size), target)
    rows = estimator.rows()
    advice = advise(estimator, rows)
    launch = ["launch", *ranks_for_launch(options, target)]
    return Report(estimator, rows, advice, command(launch, overrides, advice, cfg), source)


def vocabulary(cfg: Config) -> tuple[int, str]:
    """Return the vocabulary size and its origin, without reading the data."""
    if (size := getattr(cfg.model, "vocab_size", None)) is not None:
        return size, "model.vocab_size"
    for name, (size, whose) in PRESETS.items():
        if cfg.model.name.startswith(name):
            return size, f"assumed: {whose}; model.vocab_size=N for another"
    if (size := cfg.tokenizer.known_vocab_size) is not None:
        return size, f"tokenizer={cfg.tokenizer.name}"
    if (size := getattr(cfg.tokenizer, "vocab_size", None)) is not None:  # its maximum, before it is trained
        return size, "tokenizer.vocab_size"
    if cfg.data.name == "shakespeare":
        return 65, "the characters of data=shakespeare"
    return 256, f"assumed: data={cfg.data.name} is not read; model.vocab_size=N for another"


def command(launch: Sequence[str], overrides: Sequence[str], advice: Advice, cfg: Config) -> list[str]:
    """Return the command line that follows ``advice`` under ``launch`` and keeps the user's other overrides."""
    if advice.best is None:
        return []
    chosen = list(advice.best.strategy.overrides)
    if advice.checkpointing != cfg.train.activation_checkpointing and cfg.train.memory_budget_gb is None:
        chosen.append(f"train.activation_checkpointing={advice.checkpointing}")
    replaced = {"train.backend", *(override.partition("=")[0] for override in chosen)}
    if "train.global_batch_size" in replaced:
        replaced |= {"train.accumulation", "optimizer.gas"}
    kept = [o for o in overrides if (key := o.partition("=")[0]) not in replaced and not key.startswith("backend.")]
    return [*launch, "python", "-m", "wordrun", *kept, *chosen]


def _help() -> str:
    lines = [USAGE, "Options:", *describe(PlanConfig(), prefix="plan.")]
    names = ", ".join(f"{name} ({memory:g}{' per node' * (name == CPU)})" for name, (_, memory) in VARIANTS.items())
    lines += ["  --json                  print JSON, with sizes in bytes", "", "Devices, with their memory in GiB:"]
    lines += textwrap.wrap(names, 110, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)
