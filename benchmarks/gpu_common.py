"""What the sections of gpu.py share: their settings, their results and the report."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 50257
"""GPT-2's tokens."""
PADDED = 50304
"""Rows of the embedding in nanoGPT, a multiple of 64; wordrun gets the same by model.vocab_size."""


@dataclass(frozen=True)
class Shape:
    """GPT-2's shape with nanoGPT's choices: no biases and the exact GELU."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024

    @property
    def parameters(self) -> int:
        """Number of parameters without the position embedding, as nanoGPT's get_num_params counts."""
        return self.n_layer * 12 * self.n_embd**2 + PADDED * self.n_embd + (2 * self.n_layer + 1) * self.n_embd

    @property
    def flops_per_token(self) -> int:
        """6 N + 12 L H Q T, as nanoGPT's estimate_mfu counts; the same for both programs."""
        return 6 * self.parameters + 12 * self.n_layer * self.n_embd * self.block_size


GPT2 = Shape()
TINY = Shape(n_layer=2, n_head=2, n_embd=64, block_size=64)


@dataclass(frozen=True)
class Bench:
    """One call of gpu.py, as its sections see it."""

    section: str
    out: Path
    """Folder of results.json and the report."""
    scratch: Path
    """Folder for data, runs and caches."""
    nanogpt: Path
    tiny: bool
    """Test the script itself: two small layers on the CPU."""
    rounds: int
    variants: tuple[str, ...] = ()
    """Overrides and environment variables, separated by spaces, to compare with the defaults."""

    @property
    def shape(self) -> Shape:
        """The shape of GPT-2, or a tiny one."""
        return TINY if self.tiny else GPT2

    @property
    def device(self) -> str:
        """cuda or cpu."""
        return "cpu" if self.tiny else "cuda"

    @property
    def data(self) -> Path:
        """Folder with random tokens as nanoGPT's train.bin and val.bin, which wordrun reads as data=shards."""
        return self.scratch / "data"

    @property
    def documents(self) -> Path:
        """Folder with the same, divided into documents of 400 tokens on average."""
        return self.scratch / "documents"

    def run_dir(self, name: str) -> Path:
        """Return a new run directory; the folder above it exists."""
        folder = self.scratch / "runs"
        folder.mkdir(exist_ok=True)
        return folder / f"{name}-{time.time_ns()}"

    def add(self, table: str, **columns: Any) -> None:
        """Append a row to a table of this section, print it, and write results.json at once."""
        results = load(self.out)
        results["sections"].setdefault(self.section, {}).setdefault("tables", {}).setdefault(table, []).append(columns)
        store(self.out, results)
        print(f"{table}: " + ", ".join(f"{key} {shown(value)}" for key, value in columns.items()), flush=True)

    def rows(self, section: str, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table that an earlier section wrote."""
        found: list[dict[str, Any]] = load(self.out)["sections"].get(section, {}).get("tables", {}).get(table, [])
        return found

    def peak_flops(self) -> float | None:
        """Return the bf16 matrix peak that section peak measured in FLOP/s; None: it has not run."""
        rows = self.rows("peak", "device peaks")
        return next((1e12 * row["median"] for row in rows if row["unit"] == "TFLOP/s"), None)

    def mfu(self, flops_per_s: float) -> float | None:
        """Return percent of the measured peak."""
        peak = self.peak_flops()
        return 100 * flops_per_s / peak if peak else None


def load(out: Path) -> dict[str, Any]:
    """Return the contents of results.json."""
    path = out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"facts": {}, "sections": {}}
    return results


def store(out: Path, results: dict[str, Any]) -> None:
    """Replace results.json; a reader never sees half of it."""
    new = out / "results.json.new"
    new.write_text(json.dumps(results, indent=1))
    os.replace(new, out / "results.json")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the columns median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def shown(value: Any) -> str:
    """Return a number with four digits, or any other value as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def report(out: Path) -> str:
    """Return results.json as Markdown."""
    results = load(out)
    lines = ["# Figures on one GPU", "", *(f"- {key}: {value}" for key, value in results["facts"].items())]
    for section, content in results["sections"].items():
        lines += ["", f"## {section}: {content.get('status', 'cut off')}"]
        if "error" in content:
            lines += ["", "```", content["error"], "```"]
        for table, rows in content.get("tables", {}).items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines += ["", table, "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            lines += [f"| {' | '.join(shown(row.get(key)) for key in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def facts(command: list[str]) -> dict[str, str]:
    """Return the device, its driver, and versions."""
    import platform

    import torch

    from wordrun.common.version import __version__

    found = {
        "command": " ".join(command),
        "wordrun": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "processor cores": str(os.cpu_count()),
    }
    if torch.cuda.is_available():
        import subprocess

        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm", "--format=csv"]
        found["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        found["nvidia-smi"] = found["nvidia-smi"].replace("\n", "; ")
        found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    print("\n".join(f"{key}: {value}" for key, value in found.items()), file=sys.stderr, flush=True)
    return found


def overrides(bench: Bench, batch: int, gas: int, *, compiled: bool = True) -> list[str]:
    """Return wordrun's overrides for GPT-2 on random tokens, without evaluation, samples and checkpoints."""
    shape, dtype = bench.shape, "fp32" if bench.tiny else "bf16"
    return [
        "model=gpt2",
        f"model.n_layer={shape.n_layer}",
        f"model.n_head={shape.n_head}",
        f"model.n_embd={shape.n_embd}",
        f"model.block_size={shape.block_size}",
        "model.bias=false",
        "model.gelu=none",
        f"model.vocab_size={PADDED}",
        f"model.batch_size={batch}",
        "optimizer=adamw",  # nanoGPT's
        f"optimizer.gas={gas}",
        f"train.compile={str(compiled).lower()}",
        f"train.compile_scope={'model' if compiled else 'blocks'}",
        f"train.dtype={dtype}",
        *quiet(bench),
    ]


def replaced(options: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return ``options`` with ``words``, which replace those of the same name."""
    names = {word.partition("=")[0] for word in words}
    return [*(each for each in options if each.partition("=")[0] not in names), *words]


def quiet(bench: Bench) -> list[str]:
    """Return the overrides of every run: random tokens, and nothing but training steps."""
    return [
        "data=shards",
        f"data.path={bench.data}",
        "tracker=jsonl",
        f"train.device={bench.device}",
        *shlex.split("""
        train.eval_interval=0 train.sample_interval=0 train.sample_tokens=0 train.checkpoint_interval=0
    """),
    ]
