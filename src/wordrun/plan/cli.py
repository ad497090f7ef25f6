"""``python -m wordrun.plan [plan.KEY=VALUE] [overrides]``: arithmetic on a config; nothing is started."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from wordrun import log
from wordrun.composer import compose
from wordrun.config import BPETokenizerConfig, Config
from wordrun.errors import UserError
from wordrun.plan import memory, show
from wordrun.plan.options import DEVICES, PlanConfig, machine
from wordrun.plan.ways import Advice, Planner, advise
from wordrun.words import describe, parse

USAGE = """\
Say what a model needs of each device under every backend, what fits, and which backend to choose.

  python -m wordrun.plan model=gpt2_xl train.dtype=bf16 plan.devices=64 plan.device=a100-40
  python -m wordrun.plan model=llama3_8b plan.site=aurora plan.devices=48
  python -m wordrun.plan model=gpt3_13b plan.devices=16 train.backend=3D backend.pp=4 backend.tp=4
  python -m wordrun.plan --json model=gpt2 plan.memory=12

It takes the overrides of a run (wordrun --help), of which train.backend and backend.* become the first row, and options
of its own. It neither loads data nor touches a device. docs/plan.md says what the numbers mean.
"""
VOCABULARIES = {"gpt2": (50257, "GPT-2's"), "gpt3": (50257, "GPT-2's, which GPT-3 has, too")}
"""Rows of the embedding of presets that do not state them, by how their names begin."""
SIZES = {"gpt2": 50257, "byte": 257}
"""Words of tokenizers that have always the same."""
CHARACTERS = {"shakespeare": 65}
"""Distinct characters of data sets that are known."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    parser = argparse.ArgumentParser("python -m wordrun.plan", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args(argv)
    if args.help:
        print(_help())
        return 0
    try:
        _plan(args.words, as_json=args.json)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def _plan(words: Sequence[str], *, as_json: bool) -> None:
    options, overrides = parse(PlanConfig, words, prefix="plan.")
    devices = machine(options)
    cfg = compose(overrides)
    bf16 = DEVICES[devices.kind].bf16 if devices.kind in DEVICES else True
    if cfg.train.dtype in ("auto", "bf16"):
        cfg.train.dtype = "bf16" if bf16 else "fp32"  # as a run chooses it
    size, note = vocabulary(cfg)
    planner = Planner(cfg, memory.read(cfg.model, size, devices.on_cpu, bf16=cfg.train.dtype == "bf16"), devices)
    rows = planner.rows()
    advice = advise(planner, rows)
    line = command(overrides, advice, cfg)
    if as_json:
        print(show.as_json(planner, rows, advice, line, note))
    else:
        show.show(log.console(), planner, rows, advice, line, note)


def vocabulary(cfg: Config) -> tuple[int, str]:
    """Return the rows of the embedding, and where they come from: the data is not read for this."""
    if cfg.model.vocab_size is not None:
        return cfg.model.vocab_size, "model.vocab_size"
    for name, (size, whose) in VOCABULARIES.items():
        if cfg.model.name.startswith(name):
            return size, f"assumed: {whose}; model.vocab_size=N for another"
    if cfg.tokenizer.name in SIZES:
        return SIZES[cfg.tokenizer.name], f"tokenizer={cfg.tokenizer.name}"
    if isinstance(cfg.tokenizer, BPETokenizerConfig):
        return cfg.tokenizer.vocab_size, "tokenizer.vocab_size"
    if cfg.data.name in CHARACTERS:
        return CHARACTERS[cfg.data.name], f"the characters of data={cfg.data.name}"
    return 256, f"assumed: data={cfg.data.name} is not read; model.vocab_size=N for another"


def command(overrides: Sequence[str], advice: Advice, cfg: Config) -> list[str]:
    """Return the command line that does as ``advice`` says, with the user's other overrides."""
    if advice.best is None:
        return []
    mine = list(advice.best.way.words)
    if advice.checkpointing != cfg.train.activation_checkpointing:
        mine.append(f"train.activation_checkpointing={advice.checkpointing}")
    taken = {"train.backend", *(word.partition("=")[0] for word in mine)}
    if "train.global_batch_size" in taken:
        taken.add("optimizer.gas")
    kept = [word for word in overrides if (key := word.partition("=")[0]) not in taken and key[:8] != "backend."]
    return ["launch", "python", "-m", "wordrun", *kept, *mine]


def _help() -> str:
    lines = [USAGE, "Options:", *describe(PlanConfig, prefix="plan.")]
    names = (f"{name} ({device.memory:g})" for name, device in DEVICES.items())
    lines += ["  --json                  the plan as JSON, sizes in bytes", "", "Devices, with GiB:"]
    lines += textwrap.wrap(", ".join(names), 110, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)
