"""``wordrun study isoflop``: the best model size for each of several compute budgets (FLOPs)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from wordrun.checks import accumulation, require_transformer
from wordrun.composer import compose
from wordrun.config import Config
from wordrun.dist import World
from wordrun.errors import ConfigError, UserError, first_line
from wordrun.layouts import layout
from wordrun.plan.cli import vocabulary
from wordrun.runs import metrics
from wordrun.runs.record import RunRecord
from wordrun.study import isoflop_page
from wordrun.study.points import IMPOSSIBLE, Points, StudyPoint, positive_numbers
from wordrun.study.runner import conduct, look, new_parser, parse_study

DESCRIPTION = """\
Train models of several sizes, each until it has used the same number of floating-point operations (FLOPs), and find the
size with the lowest validation loss: an IsoFLOP study (Hoffmann et al. 2022, approach 2).

  wordrun study isoflop --budgets 1e11,3e11,1e12 --sizes model.n_embd=32,48,64,96,128 --out laws data=shakespeare
  wordrun study isoflop --budgets 1e18,3e18,1e19 --sizes model.depth=8,10,12,14,16 --out laws model=modern data=fineweb

A size may have several options: model.n_embd=64:model.n_head=2,model.n_embd=128:model.n_head=4. For each budget, a
parabola is fitted to the losses over the logarithm of the size, and a power law to the minima. Call it again to
continue: finished points are skipped. DIR receives points.csv, isoflop.md, isoflop.csv, isoflop.png and .svg.
"""
VERSION = 1
"""Of the columns."""
COLUMNS = ("budget", "size", "parameters", "n", "flops_per_token", "steps", "tokens", "flops", "loss", "val_loss")
FIXED = {
    "train.checkpoint_interval": "0", "train.sample_interval": "0", "train.sample_tokens": "0", "tracker": "jsonl",
}  # fmt: skip
"""Options of every run."""
CHOSEN = ("train.max_iters", "train.eval_interval", *FIXED)
"""Options that the study chooses."""
LEAST = 20
"""Steps below which a run says nothing about its size."""


def main(argv: Sequence[str]) -> int:
    """Run the study and return the exit status: 1 if a point failed, 75 if points are left for the next call.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    args = _parse(argv)
    return conduct(
        args, Points(args.out, "isoflop", VERSION, COLUMNS), partial(_points, args), measured,
        lambda folder, rows: isoflop_page.write(folder, rows, ["wordrun", "study", "isoflop", *argv]),
        lambda row: f"validation loss {row['val_loss']}",
    )  # fmt: skip


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("isoflop", DESCRIPTION)
    parser.add_argument(
        "--budgets", type=positive_numbers, required=True, metavar="C,...",
        help="FLOPs of a run, such as 1e18,3e18,1e19",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=_sizes, required=True, metavar="KEY=N,...",
        help="the sizes: an option with its values, such as model.n_embd=64,96,128",
    )  # fmt: skip
    return parse_study(parser, argv, CHOSEN, "--budgets")


def _sizes(text: str) -> list[list[str]]:
    """Return the overrides of each size; a value without an option is another one of the option before it."""
    found, key = [], ""
    for each in text.split(","):
        words = (each if "=" in each else f"{key}={each}").split(":")
        key = words[0].partition("=")[0]
        if not key or not all("=" in word for word in words):
            raise argparse.ArgumentTypeError(f"{text} should be an option with its values, such as model.n_embd=64,96")
        found.append(words)
    return found


def _points(args: argparse.Namespace, file: Points) -> Iterator[StudyPoint]:
    """Yield the points, the smallest budget first; those that the budget or the options rule out are recorded."""
    base = compose(args.overrides)
    require_transformer(base, " is not one of wordrun's transformers, whose FLOPs are known")
    vocab_size, ranks = _vocab_size(base), look(args, ())[1]
    for budget in args.budgets:
        for words in args.sizes:
            size = ":".join(word.removeprefix("model.") for word in words)
            name = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{budget:.3g}-{size}")
            overrides, columns, problem = [*args.overrides, *words], {"budget": f"{budget:g}", "size": size}, ""
            try:
                cfg = compose(overrides, ranks=ranks.np, per_node=ranks.ppn)
                found, more = _run_of(cfg, budget, vocab_size, args.overrides, ranks.np, ranks.ppn)
                columns |= found
                overrides += more
            except ConfigError as error:
                problem = first_line(error)
            point = StudyPoint(name, tuple(overrides), (), columns)
            if problem:
                file.check([point])
                file.put(point, IMPOSSIBLE, problem)
            yield point


def _vocab_size(cfg: Config) -> int:
    """Return the vocabulary size; unless it follows from the options, the data are prepared."""
    size, source = vocabulary(cfg)
    if not source.startswith("assumed"):
        return size
    from wordrun.prepare.obtain import obtain  # imports torch, too

    return obtain(cfg, World()).tokenizer.vocab_size


def _run_of(
    cfg: Config, budget: float, vocab_size: int, overrides: Sequence[str], ranks: int, per_node: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the known columns of a run with ``budget`` FLOPs, and the overrides that give it this length.

    Raises:
        ConfigError: the budget is too small for the model.
    """
    from wordrun.model import meta_model  # imports torch, which --help should not wait for

    model, at = meta_model(cfg.transformer, vocab_size), layout(cfg.backend, ranks, per_node)
    tokens = cfg.model.batch_size * at.dp * accumulation(cfg, at.dp) * cfg.transformer.block_size
    per_token = model.flops_per_token()
    steps = round(budget / (per_token * tokens))
    if steps < LEAST:
        raise ConfigError(
            f"{budget:g} FLOPs are {steps} steps of {tokens} tokens at {per_token:.3g} FLOPs: use a larger budget, a "
            "smaller model, or fewer sequences per step"
        )
    attention = 12 * cfg.transformer.n_layer * cfg.transformer.attention_width() * cfg.transformer.block_size
    columns = {
        "parameters": model.num_parameters(), "n": (per_token - attention) // 6, "flops_per_token": per_token,
        "steps": steps, "tokens": steps * tokens, "flops": float(steps * tokens * per_token),
    }  # fmt: skip
    # Losses on the built-in sample, which replaces a text that cannot be downloaded, would not be comparable.
    more = {**FIXED, "data.offline": "error", "train.max_iters": steps, "train.eval_interval": steps}
    if not any(word.startswith("optimizer.warmup_iters=") for word in overrides):
        more["optimizer.warmup_iters"] = min(cfg.optimizer.warmup_iters, steps // 10)
    return columns, [f"{key}={value}" for key, value in more.items()]


def measured(point: StudyPoint, run: RunRecord) -> dict[str, Any]:
    """Return the losses of a finished run.

    Raises:
        UserError: it has none.
    """
    found = metrics.read(run.path)
    loss = found.evaluation.last("val_loss")
    if loss is None:
        raise UserError("it logged no validation loss")
    return {"loss": found.training.last("loss"), "val_loss": loss}
