"""Shows the plan as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from wordrun.config import INTERLEAVED, PPConfig
from wordrun.dist.mesh import AXES
from wordrun.plan.advice import Advice
from wordrun.plan.candidates import Estimate, Planner, Unavailable
from wordrun.plan.strategy import Strategy, bubble

GIB = 2**30
FOOT = (
    "GiB per rank. total is the peak with the configured activation checkpointing; the parts before it do not all peak "
    "at the same time."
)


@dataclass(frozen=True)
class Report:
    """The result of a plan."""

    planner: Planner
    rows: list[Estimate | Unavailable]
    advice: Advice
    command: list[str]
    """The command line that follows the advice; empty if there is none."""
    vocabulary_source: str
    """Origin of the vocabulary size."""


def as_json(report: Report) -> str:
    """Return the plan as JSON, with sizes in bytes."""
    planner, advice = report.planner, report.advice
    name, layer = planner.model.largest_layer
    content = {
        "model": planner.cfg.model.name,
        "parameters": planner.model.parameters,
        "active_parameters": planner.model.active_parameters,
        "largest_layer": {"name": name, "parameters": layer},
        "vocabulary": {"size": planner.model.vocab_size, "why": report.vocabulary_source},
        "dtype": planner.cfg.train.dtype,
        "sequences_per_step": planner.sequences,
        "machine": {**asdict(planner.hardware), "usable_bytes": planner.hardware.usable},
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
        "seconds_per_step": row.seconds,
        "memory": {kind: {**asdict(each), "total": each.total} for kind, each in row.memory.items()},
    }


def show(screen: Console, report: Report) -> None:
    """Print the plan."""
    planner, advice, hardware = report.planner, report.advice, report.planner.hardware
    model, train = planner.model, planner.cfg.train
    name, layer = model.largest_layer
    active = f", {_count(model.active_parameters)} active parameters," if model.cfg.active_fraction() < 1 else ""
    screen.print(
        f"{planner.cfg.model.name}: {_count(model.parameters)} parameters{active} in {model.cfg.n_layer} blocks; the "
        f"largest layer, the {name}, has {_count(layer)}; vocabulary {model.vocab_size:,} ({report.vocabulary_source})"
    )
    # Products keep their factors in bf16 and cast them each time; how much faster they are has not been measured.
    float8 = f" (float8 products, {train.float8}: memory and time as in bf16)" if train.float8 != "none" else ""
    nodes = f"{hardware.nodes} node{'s' * (hardware.nodes > 1)} of {hardware.per_node}"
    screen.print(
        f"{hardware.devices} x {hardware.kind} on {nodes}, {hardware.memory:g} GiB each, {hardware.reserve:.0%} of it "
        f"left free: {hardware.usable / GIB:.1f} GiB usable"
    )
    screen.print(
        f"{train.dtype}{float8}, {planner.cfg.model.batch_size} sequences of {model.cfg.block_size} tokens per rank "
        f"and micro-step, {planner.sequences} per step; activation checkpointing {train.activation_checkpointing}\n"
    )
    screen.print(_table(screen, report))
    screen.print(f"\n{FOOT}\n")
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if isinstance(row, Unavailable):
            reasons.setdefault(row.reason, []).append(row.name)
    for reason, names in reasons.items():
        screen.print(f"{'; '.join(names)}: {reason}")
    screen.print(" ".join(advice.why))
    if advice.best:
        screen.print("\n  " + " ".join(report.command), soft_wrap=True)
    if advice.alternative:
        screen.print("or with DeepSpeed: " + " ".join(advice.alternative.strategy.overrides), soft_wrap=True)


def _table(screen: Console, report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD if screen.is_terminal else None, pad_edge=False, header_style="bold")
    sizes = ("param", "grad", "optim", "act none", "selective", "full", "logits", "buffers", "total")
    for head in ("backend", "layout", *sizes, "fits", "sent/step", "s/step", "bubble (2 stages)"):
        table.add_column(head, justify="left" if head in ("backend", "layout", "fits") else "right", no_wrap=True)
    configured = report.planner.checkpointing[0]
    for row in report.rows:
        if isinstance(row, Unavailable):
            table.add_row(row.name, "-", *["-"] * len(sizes), row.label)
            continue
        need = row.memory[configured]
        fits = "no" if row.fits is None else "yes" if row.fits == configured else f"with {row.fits}"
        saved = [row.memory[kind].activations for kind in ("none", "selective", "full")]
        figures = [need.parameters, need.gradients, need.optimizer, *saved, need.logits, need.buffers, need.total]
        layout = " x ".join(f"{axis} {n}" for axis, n in _layout(row.strategy).items() if n > 1) or "1"
        layout += f", ep {row.strategy.layout.ep}" if row.strategy.layout.ep > 1 else ""
        cells = [row.strategy.name, layout, *map(_gib, figures), fits, _gib(need.sent)]
        cells += ["" if row.seconds is None else f"{row.seconds:.3g}", _bubbles(row.strategy)]
        table.add_row(*cells, style=None if row.fits == configured else "dim")
    return table


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


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "0"


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"
