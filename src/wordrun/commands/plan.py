"""``wordrun plan [plan.KEY=VALUE] [overrides]``: estimates memory from a config without starting anything."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from wordrun.backend.options import INTERLEAVED, PPConfig
from wordrun.common import errors, log
from wordrun.config.arguments import describe, parse
from wordrun.config.compose import compose
from wordrun.config.schema import Config
from wordrun.dist.mesh import AXES
from wordrun.plan.devices import VARIANTS
from wordrun.plan.estimator import Estimate, Estimator, Unavailable
from wordrun.plan.options import CPU, Hardware, PlanConfig, hardware, ranks_for_launch
from wordrun.plan.parameter_shapes import shapes_of
from wordrun.plan.pipeline import bubble
from wordrun.plan.recommendation import Advice, advise
from wordrun.plan.strategy import Strategy

USAGE = """\
Estimate the memory that a model needs per device under every backend, and recommend a backend.

  wordrun plan model=gpt2_xl train.dtype=bf16 plan.ranks=64 plan.device=a100-40
  wordrun plan model=llama3_8b plan.site=aurora plan.ranks=48
  wordrun plan model=gpt3_13b plan.ranks=16 train.backend=3D backend.pp=4 backend.tp=4 train.accumulation=16
  wordrun plan model=nano plan.device=cpu plan.ranks=2 plan.memory=8
  wordrun plan --json model=gpt2 plan.memory=12

It accepts the overrides of a training run (wordrun --help) and the options below. If train.backend or backend.* is set,
the first row is for that layout. No data is read and no device is used. See docs/plan.md for the columns.
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


GIB = 2**30
FOOT = (
    "All figures are per rank. total is the peak with the configured activation checkpointing; the parts before it do "
    "not all peak at the same time."
)
ASSUMED_DEVICE = "assumed; plan.device=NAME for another, plan.device=cpu for CPUs"
SIZES = ("param", "grad", "optim", "act none", "selective", "full", "logits", "buffers", "total")
"""Columns of memory."""
LAST = SENT, BUBBLE = ("sent/step", "bubble (2 stages)")
"""Columns after ``fits``."""
IN_BYTES = (*SIZES, SENT)
LEFT_OUT_FIRST = ("buffers", "logits", BUBBLE, "full", "selective", "act none", "optim", "grad", "param", SENT)
"""Columns that are left out on a narrow terminal, in this order."""
WIDEST = 1000
"""Characters, more than any table."""


@dataclass(frozen=True)
class Report:
    """The result of a plan."""

    estimator: Estimator
    rows: list[Estimate | Unavailable]
    advice: Advice
    command: list[str]
    """The command line that follows the advice; empty if there is none."""
    vocabulary_source: str
    """Origin of the vocabulary size."""


def as_json(report: Report) -> str:
    """Return the plan as JSON, with sizes in bytes."""
    estimator, advice = report.estimator, report.advice
    name, layer = estimator.model.largest_layer
    content = {
        "model": estimator.cfg.model.name,
        "parameters": estimator.model.parameters,
        "active_parameters": estimator.model.active_parameters,
        "largest_layer": {"name": name, "parameters": layer},
        "vocabulary": {"size": estimator.model.vocab_size, "why": report.vocabulary_source},
        "dtype": estimator.cfg.train.dtype,
        "sequences_per_step": estimator.sequences,
        "machine": {**asdict(estimator.hardware), "usable_bytes": estimator.hardware.usable},
        "strategies": [_row(row) for row in report.rows],
        "advice": {"command": report.command, "activation_checkpointing": advice.checkpointing, "why": advice.why},
    }
    return json.dumps(content, indent=2)


def _row(row: Estimate | Unavailable) -> dict[str, Any]:
    if isinstance(row, Unavailable):
        return {"name": row.name, row.label: row.reason}
    strategy = row.strategy
    return {
        "name": strategy.name,
        "overrides": strategy.overrides,
        "layout": {**_layout(strategy), "ep": strategy.layout.ep},
        "fits_with": row.fits,
        "bubble": bubble(strategy),
        "memory": {kind: {**asdict(each), "total": each.total} for kind, each in row.memory.items()},
    }


def show(screen: Console, report: Report) -> None:
    """Print the plan."""
    estimator, advice = report.estimator, report.advice
    screen.print(_model(report))
    screen.print(_machine(estimator.hardware))
    screen.print(f"{_run(estimator)}\n")
    table, left_out = _table(screen, report)
    screen.print(table)
    if left_out:
        narrow = f"Columns left out because the terminal is narrow: {', '.join(left_out)}"
        screen.print(f"\n{narrow}. Append | less -S to the command to see them.")
    screen.print(f"\n{FOOT}\n")
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if isinstance(row, Unavailable):
            reasons.setdefault(row.reason, []).append(row.name)
    for reason, names in reasons.items():
        screen.print(f"{'; '.join(names)}: {reason}")
    screen.print(" ".join(advice.why))
    if advice.best:
        screen.print("\n  " + shlex.join(report.command), soft_wrap=True)
    if advice.alternative:
        strategy = advice.alternative.strategy
        screen.print(f"or with {strategy.backend.engine}: {' '.join(strategy.overrides)}", soft_wrap=True)


def _model(report: Report) -> str:
    estimator, model = report.estimator, report.estimator.model
    name, layer = model.largest_layer
    largest = f"the largest layer is {'a' if name == 'block' else 'the'} {name}, with {_count(layer)} parameters"
    active = model.cfg.active_fraction() < 1
    used = f", of which a token uses {_count(model.active_parameters)}," if active else ""
    blocks = _several(model.cfg.n_layer, "block")
    size = f"{estimator.cfg.model.name}: {_count(model.parameters)} parameters{used} in {blocks}"
    return f"{size}; {largest}; vocabulary {model.vocab_size:,} ({report.vocabulary_source})"


def _machine(hardware: Hardware) -> str:
    nodes, each = "", ""
    if hardware.devices > 1:
        per_node = f" of {hardware.per_node}" if hardware.nodes > 1 else ""
        nodes, each = f" on {_several(hardware.nodes, 'node')}{per_node}", " each"
    kind = f" ({ASSUMED_DEVICE})" if hardware.assumed == "device" else ""
    of_node = f"{hardware.memory * hardware.per_node:.4g} GiB per node" if hardware.on_cpu and each else ""
    memory = f" ({of_node})" if of_node else ""
    if hardware.assumed == "memory":
        memory = f" (assumed{': ' * bool(of_node)}{of_node}; plan.memory=GIB for another)"
    return (
        f"{hardware.devices} x {hardware.kind}{nodes}{kind}, {hardware.memory:.4g} GiB{each}{memory}, "
        f"{hardware.reserve:.0%} of it left free: {hardware.usable / GIB:.1f} GiB usable"
    )


def _run(estimator: Estimator) -> str:
    model, train = estimator.model, estimator.cfg.train
    # Float8 products keep their factors in bf16 and cast them each time; their speed-up has not been measured.
    float8 = f" (float8 products, {train.float8}: memory as in bf16)" if train.float8 != "none" else ""
    sequences = _several(estimator.cfg.model.batch_size, "sequence")
    return (
        f"{train.dtype}{float8}, {sequences} of {model.cfg.block_size} tokens per rank and micro-step, "
        f"{estimator.sequences} per step; activation checkpointing: {train.activation_checkpointing}"
    )


def _table(screen: Console, report: Report) -> tuple[Table, list[str]]:
    """Return the table, and the columns that ``screen`` is too narrow for."""
    configured = report.estimator.checkpointing[0]
    totals = [row.memory[configured].total for row in report.rows if isinstance(row, Estimate)]
    unit = "MiB" if totals and max(totals) < GIB else "GiB"
    rows = [_cells(row, configured, unit) for row in report.rows]
    heads = [head for head in ("backend", "layout", *SIZES, "fits", *LAST) if any(row.get(head) for row in rows)]
    left_out: list[str] = []
    while True:
        shown = [head for head in heads if head not in left_out]
        table = Table(box=box.SIMPLE_HEAD if screen.is_terminal else None, pad_edge=False, header_style="bold")
        for head in shown:
            words, left = f"{head}\n{unit}" if head in IN_BYTES else head, head in ("backend", "layout", "fits")
            table.add_column(words, justify="left" if left else "right", no_wrap=True)
        for row, cells in zip(report.rows, rows, strict=True):
            dim = isinstance(row, Estimate) and row.fits != configured
            table.add_row(*(cells.get(head, "") for head in shown), style="dim" if dim else None)
        wide = Measurement.get(screen, screen.options.update(max_width=WIDEST), table).maximum > screen.width
        less = next((head for head in LEFT_OUT_FIRST if head in shown), None)
        if not (wide and less):
            return table, [head for head in heads if head in left_out]
        left_out.append(less)


def _cells(row: Estimate | Unavailable, configured: str, unit: str) -> dict[str, str]:
    """Return the cells of a line of the table, by column."""
    if isinstance(row, Unavailable):
        return {"backend": row.name, "layout": "-", **dict.fromkeys(SIZES, "-"), "fits": row.label}
    need = row.memory[configured]
    saved = [row.memory[kind].activations for kind in ("none", "selective", "full")]
    figures = [need.parameters, need.gradients, need.optimizer, *saved, need.logits, need.buffers, need.total]
    layout = " x ".join(f"{axis} {n}" for axis, n in _layout(row.strategy).items() if n > 1) or "1"
    layout += f", ep {row.strategy.layout.ep}" if row.strategy.layout.ep > 1 else ""
    return {
        "backend": row.strategy.name,
        "layout": layout,
        **{head: _size(figure, unit) for head, figure in zip(SIZES, figures, strict=True)},
        "fits": "no" if row.fits is None else "yes" if row.fits == configured else f"with {row.fits}",
        SENT: _size(need.sent, unit),
        BUBBLE: _bubbles(row.strategy),
    }


def _bubbles(strategy: Strategy) -> str:
    """Return the idle fraction of the strategy's schedule and of one with two stages per rank."""
    options = strategy.backend
    if not isinstance(options, PPConfig):
        return ""
    own = f"{bubble(strategy):.1%}"
    if options.schedule in INTERLEAVED:
        return own
    two = replace(options, schedule=INTERLEAVED[0], stages_per_rank=2)
    return f"{own} ({bubble(replace(strategy, cfg=replace(strategy.cfg, backend=two))):.1%})"


def _layout(strategy: Strategy) -> dict[str, int]:
    return dict(zip(AXES, strategy.layout.shape, strict=True))


def _size(size: float, unit: str) -> str:
    if not size:
        return "0"
    return f"{size / GIB:.2f}" if unit == "GiB" else f"{size / 2**20:.1f}"


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"
