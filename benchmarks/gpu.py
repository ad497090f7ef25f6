"""The figures on one GPU: training and generation beside nanoGPT, profile, start-up, Llama, and the plan for them.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/gpu.py --nanogpt nanoGPT --out figures
    python benchmarks/gpu.py --nanogpt nanoGPT --out figures --only profile,plan --budget 120
    python benchmarks/gpu.py --nanogpt nanoGPT --out figures --only variants --variant "model.batch_size=24 NAME=VALUE"

Each section runs in a process of its own with a time limit, so that a failure loses nothing else. What it has measured
by then is in OUT/results.json. A second call with the same folder replaces the sections that it runs. OUT/gpu.md has
everything as tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from gpu_common import VOCABULARY, Bench, facts, load, report, store

SECTIONS = {
    "peak": ("gpu_device", 60),
    "gpt2": ("gpu_programs", 330),
    "variants": ("gpu_programs", 300),
    "rows": ("gpu_programs", 400),
    "loop": ("gpu_inside", 120),
    "profile": ("gpu_inside", 120),
    "start": ("gpu_programs", 180),
    "elastic": ("gpu_programs", 150),
    "llama": ("gpu_programs", 200),
    "plan": ("gpu_programs", 60),
    "generate": ("gpu_device", 200),
}
"""The sections in their order, each with its module and its limit in seconds."""


def write_data(bench: Bench) -> None:
    """Write random tokens as train.bin and val.bin, and the same divided into documents."""
    import numpy as np

    generator = np.random.default_rng(0)
    for folder in (bench.data, bench.documents):
        folder.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", 200_000 if bench.tiny else 20_000_000), ("val", 20_000)):
            path = folder / f"{name}.bin"
            if not path.exists():
                tokens = generator.integers(0, VOCABULARY, count, dtype=np.uint16)
                if folder == bench.documents:
                    tokens[generator.random(count) < 1 / 400] = VOCABULARY - 1  # end of text
                tokens.tofile(path)


def run_section(name: str, args: argparse.Namespace, limit: float) -> str:
    """Run one section in a process of its own and return how it ended."""
    command = [
        sys.executable,
        __file__,
        "--nanogpt",
        str(args.nanogpt),
        "--out",
        str(args.out),
        "--section",
        name,
        "--scratch",
        str(args.scratch),
        "--rounds",
        str(args.rounds),
        *["--tiny"] * args.tiny,
        *(f"--variant={each}" for each in args.variant),
    ]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return "done" if process.wait(limit) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return f"timed out after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # programs that the section started
        process.wait()


def section(bench: Bench) -> int:
    """Measure one section in this process; return the exit status."""
    try:
        getattr(importlib.import_module(SECTIONS[bench.section][0]), bench.section)(bench)
    except Exception:
        text = traceback.format_exc()
        print(text, flush=True)
        results = load(bench.out)
        results["sections"].setdefault(bench.section, {})["error"] = text[-3000:]
        store(bench.out, results)
        return 1
    return 0


def main() -> int:
    """Run the sections and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and gpu.md")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated (default: all)")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything (default 3600)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of wordrun and nanoGPT in gpt2 (default 2)")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="TEXT",
        help="overrides or NAME=VALUE of the environment to compare with the defaults in variants; can be repeated",
    )
    parser.add_argument("--scratch", type=Path, help="folder for data, runs and compile caches (default: temporary)")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.nanogpt, args.out = args.nanogpt.resolve(), args.out.resolve()
    if args.section:
        return section(
            Bench(args.section, args.out, args.scratch, args.nanogpt, args.tiny, args.rounds, tuple(args.variant))
        )
    names = args.only.split(",")
    if unknown := set(names) - SECTIONS.keys():
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; the sections are {', '.join(SECTIONS)}")
    end = time.monotonic() + args.budget
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        args.scratch = (args.scratch or Path(folder)).resolve()
        if paths := os.environ.get("PYTHONPATH"):  # the programs run in other folders
            os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(args.scratch / "inductor"))
        write_data(Bench("", args.out, args.scratch, args.nanogpt, args.tiny, args.rounds))
        results = load(args.out)
        results["facts"] = facts(sys.argv)
        store(args.out, results)
        for name in (name for name in SECTIONS if name in names):
            results = load(args.out)
            results["sections"][name] = {"status": "not run"}  # replaces what an earlier call measured
            store(args.out, results)
            left, began = end - time.monotonic(), time.monotonic()
            print(f"== {name} ({left:.0f} s left)", flush=True)
            status = (
                run_section(name, args, min(SECTIONS[name][1], left)) if left > 5 else "not run: the budget is spent"
            )
            results = load(args.out)
            seconds = time.monotonic() - began
            results["sections"][name] |= {"status": status, "seconds": seconds}
            store(args.out, results)
            (args.out / "gpu.md").write_text(report(args.out))
            print(f"== {name}: {status}, {seconds:.0f} s", flush=True)
    statuses = [load(args.out)["sections"][name]["status"] for name in names]
    return int(any(status != "done" for status in statuses))


if __name__ == "__main__":
    sys.exit(main())
