"""Draw docs/figures/*.svg: they follow the page's light or dark colors, and need no library.

    python docs/make_figures.py

A test checks that the figures are current. Those of memory are the plan's own numbers.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("figures")
STYLE = """<style>
  svg { color-scheme: light dark; --ink: #24292f; --soft: #6e7781; --line: #d0d7de; --box: #f6f8fa;
        --a: #3f51b5; --b: #00897b; --c: #ef6c00; --d: #8e24aa; --e: #c62828; --f: #90a4ae; --on: #fff; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9da7b3; --line: #444c56; --box: #22272e;
          --a: #7986cb; --b: #4db6ac; --c: #ffb74d; --d: #ce93d8; --e: #ef9a9a; --f: #607d8b; --on: #111; }
  }
  text { font: 13px system-ui, sans-serif; fill: var(--ink); } .soft { fill: var(--soft); font-size: 12px; }
  .on { fill: var(--on); font-size: 11px; text-anchor: middle; } .mid { text-anchor: middle; }
  .bold { font-weight: 600; }
  .end { text-anchor: end; } .box { fill: var(--box); stroke: var(--line); } .rule { stroke: var(--line); }
  .arrow { stroke: var(--soft); stroke-width: 1.5; fill: none; marker-end: url(#tip); }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
  <path d="M0 0 8 4 0 8z" fill="var(--soft)"/></marker></defs>"""


def svg(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """Return a figure of ``width`` x ``height`` units that scales with the page."""
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return f"{head}\n<title>{escape(title)}</title>\n{STYLE}\n{body}\n</svg>\n"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return one line of text."""
    chosen = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{chosen}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return a filled rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{max(width, 0):.1f}" height="{height:g}" fill="var(--{color})" rx="1.5"/>'
    )


def box(x: float, y: float, width: float, height: float, title: str, lines: Sequence[str] = ()) -> str:
    """Return a box with a title and lines below it."""
    parts = [f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    parts.append(text(x + 12, y + 22, title, "bold"))
    parts += [text(x + 12, y + 42 + 17 * i, line, "soft") for i, line in enumerate(lines)]
    return "".join(parts)


def chain() -> str:
    """The way from the command to the first step."""
    steps = """
1  launch / reads the job: hosts, devices, cores / chooses srun, PALS, mpiexec, ... / decides address, port, run ID
2  the launcher / starts the command on all hosts, / each rank through rank_env.sh, which / sets RANK, WORLD_SIZE
3  every rank / finds out who it is (wordrun.dist) / rank 0 composes the config, checks it, / and sends it to all
4  the trainer / chooses the device, joins the ranks / opens the data, builds the backend's / share of the model
"""
    parts = []
    for i, (title, *lines) in enumerate(line.strip().split(" / ") for line in steps.strip().splitlines()):
        x, y = 20 + 390 * (i % 2), 20 + 150 * (i // 2)
        parts.append(box(x, y, 340, 106, title, lines))
    parts += ['<path class="arrow" d="M360 73H408"/>', '<path class="arrow" d="M580 126V146H190V168"/>']
    parts += ['<path class="arrow" d="M360 223H408"/>']
    parts.append(
        text(
            20,
            306,
            "launch also forwards signals, ends all ranks when one fails, and writes launch.json.",
            "soft",
        )
    )
    return svg("From the command to the first step", 770, 320, parts)


PLAN = ["model=llama3_1b", "model.batch_size=2", "train.dtype=bf16", "plan.ranks=8", "plan.device=a100-40"]
SHOWN = {
    "DDP": "DDP",
    "FSDP, ZeRO-3": "FSDP",
    "FSDP within nodes": "FSDP within nodes",
    "TP over FSDP": "TP over FSDP",
    "PP": "PP",
    "3D": "3D",
}
MEMORY = {"parameters": "a", "gradients": "b", "optimizer": "c", "activations": "d", "logits": "e", "buffers": "f"}


def planned() -> dict[str, Any]:
    """Return what ``wordrun plan --json`` prints for the figure's model."""
    from wordrun.commands.plan import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*PLAN, "--json"])
    return dict(json.loads(printed.getvalue()))


def memory() -> str:
    """The memory of a rank under each backend, as planned."""
    plan = planned()
    gib, left, scale, y = 2**30, 150, 10.4, 62
    parts = [text(20, 20, f"wordrun plan {' '.join(PLAN)}", "soft")]
    for i, (kind, color) in enumerate(MEMORY.items()):
        parts += [bar(left + 100 * i, 34, 12, 12, color), text(left + 100 * i + 17, 45, kind, "soft")]
    seen = set()
    for strategy in plan["strategies"]:
        name = SHOWN.get(strategy["name"])
        if name is None or name in seen or not strategy.get("memory"):
            continue
        seen.add(name)
        x: float = left
        parts.append(text(left - 10, y + 20, name, "end"))
        for kind, color in MEMORY.items():
            width = strategy["memory"]["none"][kind] / gib * scale
            parts.append(bar(x, y + 6, width, 20, color))
            x += width
        layout = " x ".join(f"{axis} {size}" for axis, size in strategy["layout"].items() if size > 1)
        parts.append(text(x + 8, y + 21, layout, "soft"))
        y += 34
    limit = left + plan["machine"]["memory"] * scale
    parts.append(f'<path class="rule" d="M{limit:.1f} 56V{y + 4}" stroke-dasharray="4 3"/>')
    parts.append(text(limit, y + 20, f"{plan['machine']['memory']:g} GiB on the device", "soft mid"))
    parts.append(text(left, y + 20, "GiB per rank; the parts do not all peak at once", "soft"))
    return svg("Memory of a rank under each backend", 770, y + 32, parts)


def order(schedule: str, rank: int, ranks: int, micro: int) -> list[tuple[str, int]]:
    """Return the passes of a rank in order: ("F" or "B", micro-batch)."""
    if schedule == "GPipe":
        return [("F", i) for i in range(micro)] + [("B", i) for i in range(micro)]
    ahead = min(ranks - 1 - rank, micro)
    passes = [("F", i) for i in range(ahead)]
    for i in range(micro):
        passes += [("F", ahead + i)] if ahead + i < micro else []
        passes.append(("B", i))
    return passes


def simulate(schedule: str, ranks: int, micro: int) -> tuple[list[list[tuple[str, int, int, int]]], int]:
    """Return each rank's passes with begin and end, and the step's length: a forward pass takes 1."""
    ends: dict[tuple[str, int, int], int] = {}
    waiting = [order(schedule, rank, ranks, micro) for rank in range(ranks)]
    spans: list[list[tuple[str, int, int, int]]] = [[] for _ in range(ranks)]
    while any(waiting):
        for rank in range(ranks):
            while waiting[rank]:
                kind, i = waiting[rank][0]
                before = rank - 1 if kind == "F" else rank + 1
                needed = (kind, before, i) if 0 <= before < ranks else ("F", rank, i)
                if not (kind == "F" and rank == 0) and needed not in ends:
                    break
                begin = max(spans[rank][-1][3] if spans[rank] else 0, 0 if kind == "F" and rank == 0 else ends[needed])
                ends[kind, rank, i] = begin + (1 if kind == "F" else 2)
                spans[rank].append((kind, i, begin, ends[kind, rank, i]))
                waiting[rank].pop(0)
    return spans, max(span[-1][3] for span in spans)


def pipelines() -> str:
    """GPipe and 1F1B on four ranks with eight micro-batches."""
    ranks, micro, left, unit, y = 4, 8, 70, 20.6, 30
    parts = []
    for schedule in ("GPipe", "1F1B"):
        spans, total = simulate(schedule, ranks, micro)
        idle = 1 - 3 * micro / total
        parts.append(text(left, y, f"{schedule}: each rank is idle for {idle:.0%} of the step", "bold"))
        for rank in range(ranks):
            top = y + 12 + 25 * rank
            parts.append(text(left - 10, top + 15, f"rank {rank}", "end"))
            parts.append(f'<rect class="box" x="{left}" y="{top}" width="{total * unit:.1f}" height="21"/>')
            for kind, i, begin, end in spans[rank]:
                parts.append(
                    bar(left + begin * unit + 0.5, top, (end - begin) * unit - 1, 21, "a" if kind == "F" else "b")
                )
                parts.append(text(left + (begin + end) * unit / 2, top + 15, str(i), "on"))
        kept = max(peak(each) for each in spans)
        parts.append(text(left, y + 128, f"rank 0 keeps the activations of up to {kept} micro-batches", "soft"))
        y += 162
    parts += [bar(left, y - 14, 12, 12, "a"), text(left + 17, y - 4, "forward", "soft")]
    parts += [
        bar(left + 90, y - 14, 12, 12, "b"),
        text(left + 107, y - 4, "backward, twice as long; numbers are micro-batches", "soft"),
    ]
    return svg("Two pipeline schedules", 770, y + 6, parts)


def peak(spans: Iterable[tuple[str, int, int, int]]) -> int:
    """Return the largest number of micro-batches whose activations a rank holds."""
    held = most = 0
    for kind, *_ in spans:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


def schedule_of(backend: str) -> list[tuple[str, str, float, float]]:
    """Return the spans of a step of four blocks: (row, label, begin, end); a backward pass takes twice a forward."""
    spans: list[tuple[str, str, float, float]] = []
    passes = [("F", i, 2.0) for i in range(4)] + [("B", i, 4.0) for i in reversed(range(4))]
    free = {"compute": 0.0, "network": 0.0}

    def add(row: str, label: str, earliest: float, length: float) -> float:
        """Add a span as soon as its row is free, and return when it ends."""
        begin = max(free[row], earliest)
        free[row] = begin + length
        spans.append((row, label, begin, free[row]))
        return free[row]

    gathered = add("network", "g0", 0, 1.5) if backend == "FSDP" else 0.0
    for number, (kind, i, length) in enumerate(passes):
        if backend == "TP":  # two all-reduces within a block, which wait for what is computed before and after
            for _ in range(2):
                add("compute", f"{kind}{i}", free["network"], length / 2)
                add("network", "r", free["compute"], 0.7)
            continue
        begin = max(free["compute"], gathered)
        if backend == "FSDP" and number < 7:  # the next block is gathered while this one computes
            following = passes[number + 1][1]
            kept = following == i  # the last block is still there from the forward pass
            gathered = begin if kept else add("network", f"g{following}", begin, 1.5)
        end = add("compute", f"{kind}{i}", begin, length)
        if kind == "B":
            add("network", f"r{i}", end, 3.0 if backend == "DDP" else 1.5)
    return spans


def messages() -> str:
    """Who sends what when: one step of a model of four blocks, as it is scheduled."""
    left, y = 84, 30
    unit = 670 / max(span[3] for backend in ("DDP", "FSDP", "TP") for span in schedule_of(backend))
    words = {
        "DDP": "gradients of a block are averaged (r) while earlier blocks compute",
        "FSDP": "a block is gathered (g) ahead of use; its gradients are summed and scattered (r)",
        "TP": "activations are summed (r) twice per block and pass, and everybody waits",
    }
    parts = []
    for backend, meaning in words.items():
        parts += [text(left, y, backend, "bold"), text(left + 50, y, meaning, "soft")]
        for row, offset in (("compute", 10), ("network", 37)):
            parts.append(text(left - 10, y + offset + 16, row, "end"))
            end = max(span[3] for span in schedule_of(backend))
            parts.append(f'<rect class="box" x="{left}" y="{y + offset}" width="{end * unit:.1f}" height="22"/>')
            for name, label, begin, last in schedule_of(backend):
                if name == row:
                    color = "c" if row == "network" else "a" if label[0] == "F" else "b"
                    parts.append(bar(left + begin * unit + 0.5, y + offset, (last - begin) * unit - 1, 22, color))
                    parts.append(
                        text(
                            left + (begin + last) * unit / 2,
                            y + offset + 15,
                            label if (last - begin) * unit > 18 else "",
                            "on",
                        )
                    )
        y += 92
    keys = (("a", "forward"), ("b", "backward"), ("c", "communication"))
    for i, (color, word) in enumerate(keys):
        parts += [bar(left + 110 * i, y - 14, 12, 12, color), text(left + 17 + 110 * i, y - 4, word, "soft")]
    return svg("One step under DDP, FSDP and TP", 770, y + 6, parts)


PARTS = (
    ("commands", ["cli", "train", "prepare", "generate", "export", "plan", "runs", "study"]),
    ("training", ["train: trainer, hooks, optim, schedule, profile", "track", "report"]),
    ("one step", ["backend: ddp, fsdp, ...", "model: gpt, llama, ...", "data: order, loader", "checkpoint"]),
    ("the config", ["composer", "checks", "config: all options", "registry, parts: all choices"]),
    ("the ranks", ["dist: who am I, join, fail together, mesh, watch"]),
    ("the job", ["launch: planner, launchers, schedulers, sites, supervisor"]),
)


def house() -> str:
    """The map of the code."""
    parts = []
    y = 16
    for name, modules in PARTS:
        parts += [
            f'<rect class="box" x="150" y="{y}" width="604" height="46" rx="6"/>',
            text(138, y + 28, name, "end bold"),
        ]
        x = 164.0
        for module in modules:
            width = 6.6 * len(module) + 8
            head, colon, rest = module.partition(":")
            parts.append(
                f'<text x="{x:.1f}" y="{y + 28}"><tspan class="bold">{head}</tspan>{escape(colon + rest)}</text>'
            )
            x += width + 14
        y += 58
    parts.append(
        text(
            150,
            y + 10,
            "From what users call down to what starts the ranks.",
            "soft",
        )
    )
    return svg("The map of the code", 770, y + 22, parts)


FIGURES = {"chain": chain, "memory": memory, "pipelines": pipelines, "messages": messages, "house": house}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
