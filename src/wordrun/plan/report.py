"""Shows the plan as a table or as JSON."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from wordrun.backend.options import INTERLEAVED, PPConfig
from wordrun.dist.mesh import AXES
from wordrun.plan.estimator import Estimate, Estimator, Unavailable
from wordrun.plan.options import Hardware
from wordrun.plan.pipeline import bubble
from wordrun.plan.recommendation import Advice
from wordrun.plan.strategy import Strategy

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
