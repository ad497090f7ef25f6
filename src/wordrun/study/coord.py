"""``wordrun study coord``: the coordinate check of muP, and whether the best learning rate depends on the width."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wordrun.common.errors import ConfigError, UserError
from wordrun.config.compose import compose
from wordrun.config.rules import require_transformer
from wordrun.config.schema import Config
from wordrun.model.options import TransformerConfig
from wordrun.study import report
from wordrun.study.base import new_parser, parse_study, run_study
from wordrun.study.fits import power_law
from wordrun.study.points import DONE, Point, Points, number, positive_numbers
from wordrun.study.report import Report, Row
from wordrun.track import metrics_jsonl
from wordrun.track.run_json import RunRecord

DESCRIPTION = """\
Check that activations neither grow nor shrink with the width, and compare learning rates across widths, with the
standard parametrization and with muP (model.mup=true).

  wordrun study coord --out coord model.n_layer=2 model.block_size=32 model.batch_size=8
  wordrun study coord --out coord --transfer 1e-4,3e-4,1e-3,3e-3,1e-2 model.n_layer=2 model.block_size=32

For each width, the study takes a few steps and measures each layer's mean absolute activation, and how much the layer's
output has changed since the first step. It fits a power of the width to each. With --transfer, each width is also
trained with each learning rate. Run the command again to continue: finished points are skipped. DIR receives
points.csv, report.md, coord.csv, coord.png and, with --transfer, transfer.png.
"""
VERSION = 1
"""Version of the columns of points.csv."""
FIXED = {
    "train.eval_interval": "0",
    "train.checkpoint_interval": "0",
    "train.sample_interval": "0",
    "train.sample_tokens": "0",
    "tracker": "jsonl",
    "train.log_interval": "1",
    "train.backend": "DDP",
    "train.compile": "false",
}
"""Options of every run."""
CHOSEN = {
    **FIXED,
    "train.max_iters": "",
    "hooks": "",
    "schedule": "",
    "optimizer.warmup_iters": "",
    "model.n_embd": "",
    "model.mup": "",
    "model.mup_base_width": "",
    "model.mup_base_head_size": "",
}
"""Options that the study chooses, and their values; empty: by the study's options."""
KINDS = {"standard": "false", "mup": "true"}
"""Maps the parametrizations to model.mup."""
NAMES = {"standard": "standard", "mup": "muP"}
MEASURES = ("activation", "change")
FLAT = 0.2
"""Largest power of the width, in absolute value, with which a layer may change and still count as independent of it:
from 64 to 1,024, a factor of 1.7."""
NOTES = """\
Activation is the mean absolute value of a layer's output for a fixed batch of validation data; change is that of the
difference from the output before the first step. The power is the slope of its logarithm over that of the width. A
parametrization is called flat if the changes of all layers have powers between -{flat} and {flat}, and no activation
one above {flat}. (Activations may shrink: before the first step, muP's logits do.)"""

Slopes = Mapping[str, Mapping[str, Mapping[str, float]]]


def main(argv: Sequence[str]) -> int:
    """Run the study and return the exit status: 1 if a point failed, 75 if points are left for the next call.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    args = _parse(argv)
    base = compose(args.overrides)
    model = require_transformer(base, " is not one of wordrun's transformers, whose layers are measured")
    columns = ("parametrization", "width", "learning_rate", "steps", "loss", *columns_of(model))
    return run_study(
        args,
        Points(args.out, "coord", VERSION, columns),
        lambda: _points(args, base),
        measured,
        lambda folder, rows: write(folder, rows, layers_of(base.transformer), ["wordrun", "study", "coord", *argv]),
    )


def layers_of(cfg: TransformerConfig) -> list[str]:
    """Return the layers that hooks=[coordinates] measures, in order."""
    blocks = [f"blocks.{i}{part}" for i in range(cfg.n_layer) for part in (".attention", ".mlp", "")]
    return ["embedding", *blocks, "logits"]


def columns_of(cfg: TransformerConfig) -> list[str]:
    """Return the columns of measurements."""
    return [f"{measure}/{layer}" for measure in MEASURES for layer in layers_of(cfg)]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("coord", DESCRIPTION)
    parser.add_argument(
        "--widths",
        type=positive_numbers,
        default="64,128,256,512,1024",
        metavar="N,...",
        help="values of model.n_embd (default 64,128,256,512,1024)",
    )
    parser.add_argument("--base-width", type=int, metavar="N", help="model.mup_base_width (default: the smallest)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps before measuring (default 4)")
    parser.add_argument(
        "--transfer",
        type=positive_numbers,
        default=[],
        metavar="LR,...",
        help="learning rates with which to train each width",
    )
    parser.add_argument(
        "--transfer-steps", type=int, default=50, metavar="N", help="steps with each learning rate (default 50)"
    )
    args = parse_study(parser, argv, CHOSEN, "--widths, --steps, --transfer")
    if len(args.widths) < 2 or not all(width.is_integer() for width in args.widths):
        given = ",".join(f"{width:g}" for width in args.widths)
        raise ConfigError(f"--widths {given} should be two or more whole numbers, such as 64,128")
    if args.steps < 1 or args.transfer_steps < 1:
        raise ConfigError(f"--steps {args.steps} --transfer-steps {args.transfer_steps} should be at least 1")
    return args


def _points(args: argparse.Namespace, base: Config) -> Iterator[Point]:
    """Yield the points, the narrow models first."""
    for width in map(int, args.widths):
        for kind in KINDS:
            model = [*args.overrides, *_at_width(base, width, kind, args.base_width or int(args.widths[0]))]
            columns = {"parametrization": kind, "width": width, "learning_rate": base.optimizer.learning_rate}
            options = {"train.max_iters": args.steps, "hooks": "[coordinates]", "schedule": "constant"}
            yield _point(args.out, f"{kind}-{width}", model, options, columns)
            for rate in args.transfer:
                options = {"train.max_iters": args.transfer_steps, "optimizer.learning_rate": f"{rate:g}"}
                columns = {**columns, "learning_rate": rate}
                yield _point(args.out, f"{kind}-{width}-lr-{rate:g}", model, options, columns)


def _point(out: Path, name: str, model: Sequence[str], options: Mapping[str, Any], columns: Mapping[str, Any]) -> Point:
    """Return the point ``name`` with the overrides ``model`` and ``options``; ``columns`` are its own in points.csv."""
    steps = options["train.max_iters"]
    # A warm-up over a tenth of the steps protects the initial weights from large learning rates. The coordinate check,
    # which takes only a few steps, has none.
    warmup = 0 if "hooks" in options else steps // 10
    more = {**FIXED, **options, "optimizer.warmup_iters": warmup}
    overrides = [*model, *(f"{key}={value}" for key, value in more.items())]
    compose(overrides, ranks=1)
    return Point(name, out / "runs" / name, tuple(overrides), ("-n", "1"), {**columns, "steps": steps})


def _at_width(base: Config, width: int, kind: str, unchanged: int) -> list[str]:
    """Return the overrides for a model of this width: hidden units grow in proportion, the number of heads is kept.

    muP changes nothing at the width ``unchanged``.
    """
    cfg = base.transformer
    overrides = [f"model.n_embd={width}", f"model.mup={KINDS[kind]}"]
    if (hidden := cfg.hidden_at(width)) is not None:
        overrides.append(f"model.n_hidden={hidden}")
    if kind == "mup":
        overrides.append(f"model.mup_base_width={unchanged}")
    return overrides


def measured(run: RunRecord) -> dict[str, Any]:
    """Return the columns of a finished run: the loss over the last tenth of the steps, and the last measurements.

    Raises:
        UserError: its metrics are incomplete.
    """
    found = metrics_jsonl.read(run.path)
    if "loss" not in found.training:
        raise UserError("it logged no loss")
    losses = found.training["loss"]
    last = losses[-max(1, len(losses) // 10) :]
    names = [name for name in found.other.columns if name.partition("/")[0] in MEASURES]
    return {"loss": sum(last) / len(last), **{name: found.other.last(name) for name in names}}


def write(folder: Path, rows: Sequence[Row], layers: Sequence[str], command: Sequence[str]) -> list[Path]:
    """Write report.md, coord.csv and the figures, if widths can be compared; return their paths.

    Raises:
        UserError: a file cannot be written.
    """
    done = [row for row in rows if row["state"] == DONE]
    check = [row for row in done if number(row, f"change/{layers[0]}") is not None]
    transfer = [row for row in done if row not in check]
    if len({(row["parametrization"], row["width"]) for row in check}) < 2 * len(KINDS):
        return []
    slopes = slopes_of(check, layers)
    text = ["# Coordinate check", "", *(f"- {NAMES[kind]}: {verdict(slopes[kind])}" for kind in KINDS), ""]
    text.append(f"Powers of the width after {check[0]['steps']} steps:")
    heads = {"layer": "layer", **{f"{m}_{k}": f"{m}, {NAMES[k]}" for m in MEASURES for k in KINDS}}
    table = [
        {"layer": layer, **{f"{m}_{k}": f"{slopes[k][m][layer]:+.2f}" for m in MEASURES for k in KINDS}}
        for layer in layers
    ]
    figures, notes = {"coord": _draw(check, layers)}, [NOTES.format(flat=FLAT)]
    if transfer:
        notes += ["", *_transfer(transfer)]
        figures["transfer"] = _draw_transfer(transfer)
    return Report("coord", text, heads, table, figures, notes).write(folder, rows, command)


def slopes_of(rows: Sequence[Row], layers: Sequence[str]) -> Slopes:
    """Return the powers of the width by parametrization, measure and layer; NaN where there is nothing to fit."""
    return {
        kind: {
            measure: {layer: _slope(_over_width(rows, kind, f"{measure}/{layer}")) for layer in layers}
            for measure in MEASURES
        }
        for kind in KINDS
    }


def verdict(slopes: Mapping[str, Mapping[str, float]]) -> str:
    """Return whether all layers are flat and, if not, which is the least so."""
    excess = {(m, layer): abs(s) if m == "change" else s for m, each in slopes.items() for layer, s in each.items()}
    worst = max(excess, key=lambda key: -math.inf if math.isnan(excess[key]) else excess[key])
    is_flat = "flat" if excess[worst] <= FLAT else "not flat"
    return f"{is_flat} (the {worst[0]} of {worst[1]} has the power {slopes[worst[0]][worst[1]]:+.2f})"


def _slope(points: Sequence[tuple[float, float]]) -> float:
    points = [(x, y) for x, y in points if y > 0]  # projections may start with zeros
    if len({x for x, _ in points}) < 2:
        return math.nan
    return power_law([x for x, _ in points], [y for _, y in points]).exponent


def _over_width(rows: Sequence[Row], kind: str, column: str) -> list[tuple[float, float]]:
    """Return the widths of one parametrization and what was measured there."""
    mine = [(number(row, "width"), number(row, column)) for row in rows if row["parametrization"] == kind]
    return sorted((x, y) for x, y in mine if x is not None and y is not None and math.isfinite(y))


def _draw(rows: Sequence[Row], layers: Sequence[str]) -> Any:
    titles = [f"{measure}, {NAMES[kind]}" for measure in MEASURES for kind in KINDS]
    image, axes = report.panels(titles)
    shown = [(measure, kind) for measure in MEASURES for kind in KINDS]
    for panel, (measure, kind) in zip(axes, shown, strict=True):
        for layer, color in zip(layers, report.colors(len(layers)), strict=True):
            points = [(x, y) for x, y in _over_width(rows, kind, f"{measure}/{layer}") if y > 0]
            panel.plot(*zip(*points, strict=True) if points else ((), ()), "o-", ms=3, lw=1, color=color, label=layer)
        panel.set(xscale="log", yscale="log", xlabel="width")
        report.mark(panel.xaxis, sorted({int(row["width"]) for row in rows}))
    for left in axes[::2]:
        left.set_ylabel("mean absolute value")
    image.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return image


def _losses(rows: Sequence[Row], kind: str, width: int) -> list[tuple[float, float]]:
    mine = [row for row in rows if row["parametrization"] == kind and int(row["width"]) == width]
    return sorted((number(row, "learning_rate") or 0.0, number(row, "loss") or math.inf) for row in mine)


def _transfer(rows: Sequence[Row]) -> list[str]:
    """Return lines with the best learning rate and its loss at each width."""
    lines = ["## Learning rates", ""]
    for kind, name in NAMES.items():
        for width in sorted({int(row["width"]) for row in rows if row["parametrization"] == kind}):
            rate, loss = min(_losses(rows, kind, width), key=lambda point: point[1])
            lines.append(f"- {name}, width {width}: the best learning rate is {rate:g}, with loss {loss:.3f}")
    return [*lines, "", f"Losses are means over the last tenth of {rows[0]['steps']} steps, in nats per token."]


def _draw_transfer(rows: Sequence[Row]) -> Any:
    image, axes = report.panels(list(NAMES.values()))
    widths = sorted({int(row["width"]) for row in rows})
    for panel, kind in zip(axes, KINDS, strict=True):
        for width, color in zip(widths, report.colors(len(widths)), strict=True):
            losses = _losses(rows, kind, width)
            panel.plot(*zip(*losses, strict=True), "o-", ms=3, lw=1, color=color, label=str(width))
            panel.plot(*min(losses, key=lambda point: point[1]), "*", ms=10, color=color)
        panel.set(xscale="log", xlabel="learning rate")
    axes[0].set_ylabel("training loss [nats/token]")
    axes[1].legend(title="width", frameon=False, fontsize=8)
    return image
