"""Make docs/status.md, the table of what has run where, of docs/status.yaml; called by make_reference.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

SOURCE = Path(__file__).with_name("status.yaml")
HEAD = """\
# Status: what has run where

A date links to a results file, "test" to a test that `bin/test` runs. **An empty cell has not run.** "One GPU" is an
NVIDIA H100 or H200. "Real scheduler" is SLURM or OpenPBS with several nodes simulated on one machine. "Real site" is a
cluster with its own network and file system: none so far, so please tell us how it works on yours.

"Losses of one process" means that losses match to 1e-5 (relative) in fp32 on CPUs over gloo, with
`train.global_batch_size` fixed and without dropout; in bf16 they differ by about 1e-4. They have not been compared
across two GPUs.
"""


def evidence(cell: str) -> str:
    """Return the file of a cell, below the top of the repository."""
    file = cell.partition("::")[0]
    return f"benchmarks/results/{file}" if file.endswith(".md") else f"tests/{file}"


def render() -> str:
    """Return the text of status.md."""
    status: dict[str, Any] = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    columns = status["columns"]
    parts = [HEAD]
    for group, rows in status["groups"].items():
        parts.append(f"\n| {group} | {' | '.join(columns.values())} |\n|---|{'---|' * len(columns)}\n")
        for feature, cells in rows.items():
            if isinstance(cells, str):  # why there is nothing to run
                parts.append(f"| {feature}: *{cells}* |{' |' * len(columns)}\n")
                continue
            dates = {
                name: f"[{cell[:10] if cell.endswith('.md') else 'test'}](../{evidence(cell)})"
                for name, cell in cells.items()
            }
            parts.append(f"| {feature} | {' | '.join(dates.get(name, '') for name in columns)} |\n")
    return "".join(parts)


def write() -> None:
    """Write the page."""
    SOURCE.with_suffix(".md").write_text(render(), encoding="utf-8")
