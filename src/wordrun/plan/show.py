"""The plan as a table for people, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from wordrun.config import INTERLEAVED, PPConfig
from wordrun.dist.mesh import AXES, Layout
from wordrun.plan.memory import Way, bubble
from wordrun.plan.options import Machine
from wordrun.plan.ways import Advice, Estimate, Impossible, Planner, largest_layer

GIB = 2**30
FOOT = (
    "GiB for each rank. Not all of it is there at once: total is the peak, with the run's own activation checkpointing."
)


def as_json(planner: Planner, rows: list[Estimate | Impossible], advice: Advice, line: list[str], note: str) -> str:
    """Return the plan as JSON; sizes in bytes."""
    name, layer = largest_layer(planner.model)
    content = {
        "model": planner.cfg.model.name,
        "parameters": planner.model.parameters,
        "largest_layer": {"name": name, "parameters": layer},
        "vocabulary": {"size": planner.model.vocab_size, "why": note},
        "dtype": planner.cfg.train.dtype,
        "sequences_per_step": planner.sequences,
        "machine": {**asdict(planner.machine), "usable_bytes": planner.machine.usable},
        "ways": [_facts(row) for row in rows],
        "advice": {"command": line, "activation_checkpointing": advice.checkpointing, "why": advice.why},
    }
    return json.dumps(content, indent=2)


def _facts(row: Estimate | Impossible) -> dict[str, Any]:
    if isinstance(row, Impossible):
        return {"name": row.name, "impossible": row.reason}
    return {
        "name": row.way.name,
        "overrides": row.way.words,
        "layout": {axis: getattr(row.way.layout, axis) for axis in AXES},
        "fits_with": row.fits,
        "bubble": bubble(row.way),
        "memory": {kind: {**asdict(each), "total": each.total} for kind, each in row.memory.items()},
    }


def show(
    screen: Console, planner: Planner, rows: list[Estimate | Impossible], advice: Advice, line: list[str], note: str
) -> None:
    """Print the plan for people."""
    model, machine, train = planner.model, planner.machine, planner.cfg.train
    name, layer = largest_layer(model)
    screen.print(
        f"{planner.cfg.model.name}: {_count(model.parameters)} parameters in {model.cfg.n_layer} blocks; the largest "
        f"layer, the {name}, has {_count(layer)}; vocabulary {model.vocab_size:,} ({note})"
    )
    screen.print(_machine(machine))
    screen.print(
        f"{train.dtype}, {planner.cfg.model.batch_size} sequences of {model.cfg.block_size} tokens per rank and "
        f"micro-step, {planner.sequences} in a step; activation checkpointing {train.activation_checkpointing}\n"
    )
    screen.print(_table(screen, planner, rows))
    screen.print(f"\n{FOOT}\n")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row, Impossible):
            reasons.setdefault(row.reason, []).append(row.name)
    for reason, names in reasons.items():
        screen.print(f"{'; '.join(names)}: {reason}")
    screen.print(" ".join(advice.why))
    if advice.best:
        screen.print("\n  " + " ".join(line), soft_wrap=True)
    if advice.alternative:
        screen.print("or with DeepSpeed: " + " ".join(advice.alternative.way.words), soft_wrap=True)


def _machine(machine: Machine) -> str:
    nodes = f"{machine.nodes} node{'s' * (machine.nodes > 1)} of {machine.per_node}"
    return (
        f"{machine.devices} x {machine.kind} on {nodes}, {machine.memory:g} GiB each, of which {machine.reserve:.0%} "
        f"stay free: {machine.usable / GIB:.1f} GiB to fill"
    )


def _table(screen: Console, planner: Planner, rows: list[Estimate | Impossible]) -> Table:
    table = Table(box=box.SIMPLE_HEAD if screen.is_terminal else None, pad_edge=False, header_style="bold")
    table.add_column("backend", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    heads = ("param", "grad", "optim", "act none", "selective", "full", "logits", "buffers", "total", "fits")
    for head in (*heads, "sent/step", "bubble (2 runs)"):
        table.add_column(head, justify="left" if head == "fits" else "right", no_wrap=True)
    mine = planner.kinds[0]
    for row in rows:
        if isinstance(row, Impossible):
            table.add_row(row.name, "-", *["-"] * 9, "impossible")
            continue
        need = row.memory[mine]
        fits = "no" if row.fits is None else "yes" if row.fits == mine else f"with {row.fits}"
        kept = [row.memory[kind].activations for kind in ("none", "selective", "full")]
        sizes = [need.parameters, need.gradients, need.optimizer, *kept, need.logits, need.buffers, need.total]
        table.add_row(
            row.way.name, _short(row.way.layout), *map(_gib, sizes), fits, _gib(need.sent), _bubbles(row.way),
            style=None if row.fits == mine else "dim",
        )  # fmt: skip
    return table


def _bubbles(way: Way) -> str:
    """Return the idle share of the way's schedule, and of one with two runs of blocks on a rank."""
    options = way.backend
    if not isinstance(options, PPConfig):
        return ""
    own = f"{bubble(way):.1%}"
    if options.schedule in INTERLEAVED:
        return own
    runs = replace(options, schedule=INTERLEAVED[0], stages_per_rank=2)
    return f"{own} ({bubble(replace(way, cfg=replace(way.cfg, backend=runs))):.1%})"


def _short(layout: Layout) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in zip(AXES, layout.shape, strict=True) if n > 1) or "1"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "0"


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"
