"""``wordrun study isoflop``: the best model size for each of several compute budgets (FLOPs)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wordrun.commands.plan import vocabulary
from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.config.compose import compose
from wordrun.config.rules import require_transformer
from wordrun.config.schema import Config
from wordrun.dist import World
from wordrun.study import report
from wordrun.study.base import new_parser, parse_study, run_study
from wordrun.study.fits import Optimum, PowerLaw, minimum, power_law
from wordrun.study.placements import look
from wordrun.study.points import DONE, Point, Points, number, positive_numbers
from wordrun.study.report import Report, Row
from wordrun.track import metrics_jsonl
from wordrun.track.run_json import RunRecord
from wordrun.train.options import accumulation

DESCRIPTION = """\
Train models of several sizes, each until it has used the same number of floating-point operations (FLOPs), and find the
size with the lowest validation loss: an IsoFLOP study (Hoffmann et al. 2022, approach 2).

  wordrun study isoflop --budgets 1e11,3e11,1e12 --sizes model.n_embd=32,48,64,96,128 --out laws data=shakespeare
  wordrun study isoflop --budgets 1e18,3e18,1e19 --sizes model.depth=8,10,12,14,16 --out laws model=modern data=fineweb

A size may have several options: model.n_embd=64:model.n_head=2,model.n_embd=128:model.n_head=4. For each budget, a
parabola is fitted to the losses over the logarithm of the size, and a power law to the minima. Run the command again to
continue: finished points are skipped. DIR receives points.csv, report.md, isoflop.csv and isoflop.png.
"""
VERSION = 1
"""Version of the columns of points.csv."""
COLUMNS = ("budget", "size", "parameters", "n", "flops_per_token", "steps", "tokens", "flops", "loss", "val_loss")
FIXED = {
    "train.checkpoint_interval": "0",
    "train.sample_interval": "0",
    "train.sample_tokens": "0",
    "tracker": "jsonl",
}
"""Options of every run."""
CHOSEN = {"train.max_iters": "", "train.eval_interval": "", **FIXED}
"""Options that the study chooses, and their values; empty: by the study's options."""
LEAST = 20
"""Minimum number of steps of a run; the loss after fewer tells nothing about the model's size."""
HEADS = {
    "budget": "budget [FLOPs]",
    "sizes": "sizes",
    "n": "best N",
    "n_relative_error": "relative error",
    "tokens": "tokens D",
    "tokens_per_n": "D / N",
    "loss": "loss",
}
NOTES = """\
N counts the weights of matrix products: the blocks' and the output layer's, without embeddings. FLOPs are counted as
6 N per token, plus the attention. The best N is the minimum of a parabola in log N; its standard error follows from the
scatter of the losses around the parabola. D is interpolated between the runs. Minima outside the range of trained sizes
are extrapolated, and the power laws leave them out."""


def main(argv: Sequence[str]) -> int:
    """Run the study and return the exit status: 1 if a point failed, 75 if points are left for the next call.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    args = _parse(argv)
    return run_study(
        args,
        Points(args.out, "isoflop", VERSION, COLUMNS),
        lambda: _points(args),
        measured,
        lambda folder, rows: write(folder, rows, ["wordrun", "study", "isoflop", *argv]),
        lambda row: f"validation loss {row['val_loss']}",
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("isoflop", DESCRIPTION)
    parser.add_argument(
        "--budgets",
        type=positive_numbers,
        required=True,
        metavar="C,...",
        help="FLOPs of a run, such as 1e18,3e18,1e19",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        required=True,
        metavar="KEY=N,...",
        help="the sizes: an option with its values, such as model.n_embd=64,96,128",
    )
    return parse_study(parser, argv, CHOSEN, "--budgets")


def _sizes(text: str) -> list[list[str]]:
    """Return the overrides of each size; a value without a key has the key of the one before."""
    found, key = [], ""
    for each in text.split(","):
        words = (each if "=" in each else f"{key}={each}").split(":")
        key = words[0].partition("=")[0]
        if not key or not all("=" in word for word in words):
            raise argparse.ArgumentTypeError(f"{text} should be an option with its values, such as model.n_embd=64,96")
        found.append(words)
    return found


def _points(args: argparse.Namespace) -> Iterator[Point]:
    """Yield the points, the smallest budget first."""
    base = compose(args.overrides)
    require_transformer(base, " is not one of wordrun's transformers, whose FLOPs are known")
    vocab_size, ranks = _vocab_size(base), look(args.launch, submit=args.submit)
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
            yield Point(name, args.out / "runs" / name, tuple(overrides), (), columns, problem=problem)


def _vocab_size(cfg: Config) -> int:
    """Return the vocabulary size; unless it follows from the options, the data are prepared."""
    size, source = vocabulary(cfg)
    if not source.startswith("assumed"):
        return size
    from wordrun.data.corpus import corpus_of_run  # imports torch, too

    return corpus_of_run(cfg, World()).tokenizer.vocab_size


def _run_of(
    cfg: Config, budget: float, vocab_size: int, overrides: Sequence[str], ranks: int, per_node: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the columns of a run with ``budget`` FLOPs that are known in advance, and the overrides for its steps.

    Raises:
        ConfigError: the budget is too small for the model.
    """
    from wordrun.model.construction import meta_model  # imports torch, which --help should not wait for

    model, at = meta_model(cfg.transformer, vocab_size), cfg.backend.layout(ranks, per_node)
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
        "parameters": model.num_parameters(),
        "n": (per_token - attention) // 6,
        "flops_per_token": per_token,
        "steps": steps,
        "tokens": steps * tokens,
        "flops": float(steps * tokens * per_token),
    }
    # Losses on the built-in sample, which replaces a text that cannot be downloaded, would not be comparable.
    more = {**FIXED, "data.offline": "error", "train.max_iters": steps, "train.eval_interval": steps}
    if not any(word.startswith("optimizer.warmup_iters=") for word in overrides):
        more["optimizer.warmup_iters"] = min(cfg.optimizer.warmup_iters, steps // 10)
    return columns, [f"{key}={value}" for key, value in more.items()]


def measured(run: RunRecord) -> dict[str, Any]:
    """Return the losses of a finished run.

    Raises:
        UserError: it has none.
    """
    found = metrics_jsonl.read(run.path)
    loss = found.evaluation.last("val_loss")
    if loss is None:
        raise UserError("it logged no validation loss")
    return {"loss": found.training.last("loss"), "val_loss": loss}


@dataclass(frozen=True)
class Budget:
    """The runs with one budget, and the best size."""

    flops: float
    points: Sequence[tuple[float, float, float]]
    """N, tokens and loss of each run, by N."""
    best: Optimum | None

    @property
    def tokens(self) -> float:
        """Tokens of the best size, interpolated between the runs."""
        assert self.best is not None
        sizes, tokens, _ = zip(*self.points, strict=True)
        return float(np.exp(np.interp(np.log(self.best.x), np.log(sizes), np.log(tokens))))


def write(folder: Path, rows: Sequence[Row], command: Sequence[str]) -> list[Path]:
    """Write report.md, isoflop.csv and isoflop.png; return their paths.

    Raises:
        UserError: a file cannot be written.
    """
    found = budgets(rows)
    laws = fitted(found)
    text = ["# Best model size for each budget", ""]
    for name, what in (("n", "N"), ("tokens", "D")):
        if law := laws.get(name):
            text.append(f"- {what} = {law.factor:.3g} C^{shown(law.exponent, law.error)}")
    if not laws:
        text.append("- no power law: it needs the minima of at least two budgets")
    table, figures = [_values(each) for each in found], {"isoflop": _draw(found, laws.get("n"))}
    return Report("isoflop", text, HEADS, table, figures, [NOTES]).write(folder, rows, command)


def budgets(rows: Sequence[Row]) -> list[Budget]:
    """Return the budgets with finished points, the smallest first, each with its fit."""
    groups: dict[float, list[tuple[float, float, float]]] = {}
    for row in rows:
        n, tokens, loss = (number(row, name) for name in ("n", "tokens", "val_loss"))
        if row["state"] == DONE and None not in (n, tokens, loss):
            groups.setdefault(float(row["budget"]), []).append((n or 0.0, tokens or 0.0, loss or 0.0))
    return [
        Budget(flops, sorted(points), minimum([n for n, _, _ in points], [loss for _, _, loss in points]))
        for flops, points in sorted(groups.items())
    ]


def fitted(found: Sequence[Budget]) -> dict[str, PowerLaw]:
    """Return the best N and its tokens as powers of the budget; empty with fewer than two minima."""
    inside = [(each, each.best) for each in found if each.best is not None and each.best.inside]
    if len(inside) < 2:
        return {}
    flops, errors = [each.flops for each, _ in inside], [best.error for _, best in inside]
    return {
        "n": power_law(flops, [best.x for _, best in inside], errors),
        # At a given budget, twice the size leaves about half the tokens: the relative errors are the same.
        "tokens": power_law(flops, [each.tokens for each, _ in inside], errors),
    }


def shown(value: float, error: float | None) -> str:
    """Return a value with its error, if it is known."""
    return f"{value:.3f}" if error is None else f"({value:.3f} ± {error:.3f})"


def _values(each: Budget) -> dict[str, Any]:
    """Return a row of the table, by the columns in HEADS."""
    best = each.best
    values: dict[str, Any] = {"budget": f"{each.flops:g}", "sizes": len(each.points)}
    if best is None:
        why = "no minimum" if len(each.points) > 2 else "too few sizes"
    elif not best.inside:
        why = "below the smallest" if best.x < each.points[0][0] else "above the largest"
    else:
        ratio = each.tokens / best.x
        return {
            **values,
            "n": best.x,
            "n_relative_error": best.error,
            "tokens": each.tokens,
            "tokens_per_n": ratio,
            "loss": f"{best.y:.4f}",
        }
    return {**dict.fromkeys(HEADS), **values, "n": why}


def _draw(found: Sequence[Budget], law: PowerLaw | None) -> Any:
    from matplotlib.ticker import LogLocator, NullLocator

    image, (left, right) = report.panels(["loss of each size", "best size of each budget"], same_y=False)
    for each, color in zip(found, report.colors(len(found)), strict=True):
        sizes = [n for n, _, _ in each.points]
        left.plot(sizes, [loss for _, _, loss in each.points], "o", ms=4, color=color, label=f"{each.flops:.3g} FLOPs")
        best = each.best
        if best is None:
            continue
        span = np.geomspace(sizes[0], sizes[-1], 100)
        left.plot(span, [best.at(x) for x in span], lw=1, color=color)
        if best.inside:
            left.plot(best.x, best.y, "*", ms=11, color=color)
            right.errorbar(each.flops, best.x, yerr=_bar(best), fmt="*", ms=10, capsize=3, color=color)
    left.set(xscale="log", xlabel="N (weights of matrix products)", ylabel="validation loss [nats/token]")
    left.legend(frameon=False, fontsize=8)
    if law:
        _line(right, found, law)
    right.set(xscale="log", yscale="log", xlabel="budget C [FLOPs]", ylabel="best N")
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+0", "e").replace("e+", "e"))
        axis.set_minor_locator(NullLocator())
    return image


def _bar(best: Optimum) -> Any:
    """Return the lengths of the error bars below and above; the error is one of the logarithm."""
    return None if best.error is None else [[best.x * (1 - np.exp(-best.error))], [best.x * (np.exp(best.error) - 1)]]


def _line(axes: Any, found: Sequence[Budget], law: PowerLaw) -> None:
    flops = np.geomspace(found[0].flops / 1.5, found[-1].flops * 1.5, 50)
    label = f"N = {law.factor:.2g} C^{shown(law.exponent, law.error)}"
    axes.plot(flops, [law.at(x) for x in flops], "--", lw=1, color="gray", label=label)
    axes.legend(frameon=False, fontsize=8)
