"""Summarizes a trace of torch.profiler: the device's time by kind of kernel, by kernel, and by matrix product."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("optimizer", r"adam|sgd"),
    ("gradient norm and clipping", r"multi_tensor|foreach|lpnorm|lp_norm|linalg_vector_norm"),
    ("loss", r"softmax|nll|cross_entropy|logsumexp"),
    ("norms", r"layer_?norm|rms_?norm|gammabeta"),
    ("embedding", r"embedding|index|sort|radix|scatter|gather"),
    (
        "copies and fills",
        r"memcpy|memset|copy_kernel|copy_device|^triton_poi_fused__to_copy_\d|fillfunctor|zeros|aten::(copy_|zero_|fill_)",
    ),
)
"""Kinds of kernels, the first match counts; what matches none is elementwise or other."""
PRODUCT = r"gemm|nvjet|cutlass|xmma|cublas|splitk|triton_tem_|aten::(mm|addmm|bmm|linear|baddbmm)$"


@dataclass(frozen=True)
class Row:
    """Time per step of one kernel, or of one matrix product."""

    name: str
    kind: str
    ms: float
    calls: float
    flops: float = 0.0
    """Operations per step."""


@dataclass(frozen=True)
class Summary:
    """What a trace says about a step."""

    busy_ms: float
    """Time in which at least one kernel ran."""
    window_ms: float
    """Time from the first kernel to the end of the last, under the profiler, which slows down the host."""
    launches: float
    kinds: list[tuple[str, float]]
    kernels: list[Row]
    products: list[Row]


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    low = name.lower()
    generated = low.startswith("triton_") and not low.startswith("triton_tem_")
    if not generated and re.search(PRODUCT, low) and not re.search(KINDS[0][1], low):
        return "matrix products"
    return next((kind for kind, pattern in KINDS if re.search(pattern, low)), "elementwise and other")


def short(name: str) -> str:
    """Return the name of a kernel without its return type, arguments and most of its template arguments."""
    name = re.sub(r"^void ", "", name).replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= 110 else f"{name[:80]}...{name[-27:]}"


def flops_of(operation: str, dims: list[list[int]]) -> float:
    """Return the operations of one matrix product from its inputs' shapes; 0: unknown."""
    first = 1 if operation in ("aten::addmm", "aten::baddbmm") else 0  # after the bias
    matrices = dims[first : first + 2]
    if len(matrices) < 2 or min(map(len, matrices)) < 2 or matrices[0][-1] != matrices[1][-2]:
        return 0.0
    return 2.0 * math.prod(matrices[0]) * matrices[1][-1]


def summarize(path: Path, steps: int, *, on_cpu: bool = False) -> Summary:
    """Return the summary of a Chrome trace of ``steps`` steps. On a CPU, its operators stand in for kernels."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    kernels = operators if on_cpu else [event for event in events if event.get("cat") in ON_DEVICE]
    if not kernels:
        raise RuntimeError("the profiler recorded no kernels")
    by_id = {event.get("args", {}).get("External id"): event for event in operators}
    milliseconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    kinds: dict[str, float] = defaultdict(float)
    products: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in kernels:
        name, spent = event["name"], event["dur"] / 1000
        kind = kind_of(name)
        kinds[kind] += spent
        milliseconds[name] += spent
        calls[name] += 1
        if kind == "matrix products":
            source: dict[str, Any] = by_id.get(event.get("args", {}).get("External id"), event)
            dims = source.get("args", {}).get("Input Dims", [])
            key = f"{source['name']} {' x '.join(str(each) for each in dims if each)}: {short(name)[:60]}"
            total = products[key]
            for at, value in enumerate((spent, 1.0, flops_of(source["name"], dims))):
                total[at] += value
    rows = [Row(short(name), kind_of(name), spent / steps, calls[name] / steps) for name, spent in milliseconds.items()]
    gemms = [Row(key, "", ms / steps, n / steps, flops / steps) for key, (ms, n, flops) in products.items()]
    begin, end = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
    return Summary(
        busy_ms=_union([(e["ts"], e["ts"] + e["dur"]) for e in kernels]) / 1000 / steps,
        window_ms=(end - begin) / 1000 / steps,
        launches=len(kernels) / steps,
        kinds=sorted(((kind, spent / steps) for kind, spent in kinds.items()), key=lambda each: -each[1]),
        kernels=sorted(rows, key=lambda row: -row.ms),
        products=sorted(gemms, key=lambda row: -row.ms),
    )


def _union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
