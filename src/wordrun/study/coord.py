"""``wordrun study coord``: the coordinate check of muP, and whether the best learning rate depends on the width."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from wordrun.checks import require_transformer
from wordrun.composer import compose
from wordrun.config import Config, TransformerConfig
from wordrun.errors import ConfigError, UserError
from wordrun.runs import metrics
from wordrun.runs.record import RunRecord
from wordrun.study import coord_page
from wordrun.study.points import Points, StudyPoint, positive_numbers
from wordrun.study.runner import conduct, new_parser, parse_study

DESCRIPTION = """\
Check that activations neither grow nor shrink with the width, and compare learning rates across widths, with the
standard parametrization and with muP (model.mup=true).

  wordrun study coord --out coord model.n_layer=2 model.block_size=32 model.batch_size=8
  wordrun study coord --out coord --transfer 1e-4,3e-4,1e-3,3e-3,1e-2 model.n_layer=2 model.block_size=32

For each width, a few steps are taken, and the mean absolute activation of each layer, and its change since the first
step, are fitted by powers of the width. With --transfer, each width is also trained with each learning rate. Call it
again to continue: finished points are skipped. DIR receives points.csv, coord.md, coord.png and .svg.
"""
VERSION = 1
"""Of the columns."""
FIXED = {
    "train.eval_interval": "0", "train.checkpoint_interval": "0", "train.sample_interval": "0",
    "train.sample_tokens": "0", "tracker": "jsonl", "train.log_interval": "1", "train.backend": "DDP",
    "train.compile": "false",
}  # fmt: skip
"""Options of every run."""
CHOSEN = (
    *FIXED, "train.max_iters", "hooks", "schedule", "optimizer.warmup_iters", "model.n_embd", "model.mup",
    "model.mup_base_width", "model.mup_base_head_size",
)  # fmt: skip
"""Options that the study chooses."""
KINDS = {"standard": "false", "mup": "true"}
"""Maps the parametrizations to model.mup."""


def main(argv: Sequence[str]) -> int:
    """Run the study and return the exit status: 1 if a point failed, 75 if points are left for the next call.

    Raises:
        UserError: options are wrong, or results cannot be written.
    """
    args = _parse(argv)
    base = compose(args.overrides)
    model = require_transformer(base, " is not one of wordrun's transformers, whose layers are measured")
    columns = ("parametrization", "width", "learning_rate", "steps", "loss", *columns_of(model))
    return conduct(
        args, Points(args.out, "coord", VERSION, columns), lambda file: _points(args, base), measured,
        lambda folder, rows: coord_page.write(
            folder, rows, layers_of(base.transformer), ["wordrun", "study", "coord", *argv]
        ),
    )  # fmt: skip


def layers_of(cfg: TransformerConfig) -> list[str]:
    """Return the layers that hooks=[coordinates] measures, in order."""
    blocks = [f"blocks.{i}{part}" for i in range(cfg.n_layer) for part in (".attention", ".mlp", "")]
    return ["embedding", *blocks, "logits"]


def columns_of(cfg: TransformerConfig) -> list[str]:
    """Return the columns of measurements."""
    return [f"{measure}/{layer}" for measure in coord_page.MEASURES for layer in layers_of(cfg)]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("coord", DESCRIPTION)
    parser.add_argument(
        "--widths", type=positive_numbers, default="64,128,256,512,1024", metavar="N,...",
        help="values of model.n_embd (default 64,128,256,512,1024)",
    )  # fmt: skip
    parser.add_argument("--base-width", type=int, metavar="N", help="model.mup_base_width (default: the smallest)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps before measuring (default 4)")
    parser.add_argument(
        "--transfer", type=positive_numbers, default=[], metavar="LR,...",
        help="learning rates with which to train each width",
    )  # fmt: skip
    parser.add_argument(
        "--transfer-steps", type=int, default=50, metavar="N", help="steps with each of them (default 50)"
    )
    args = parse_study(parser, argv, CHOSEN, "--widths, --steps, --transfer")
    if len(args.widths) < 2 or not all(width.is_integer() for width in args.widths):
        given = ",".join(f"{width:g}" for width in args.widths)
        raise ConfigError(f"--widths {given} should be two or more whole numbers, such as 64,128")
    if args.steps < 1 or args.transfer_steps < 1:
        raise ConfigError(f"--steps {args.steps} --transfer-steps {args.transfer_steps} should be at least 1")
    return args


def _points(args: argparse.Namespace, base: Config) -> Iterator[StudyPoint]:
    """Yield the points, the narrow models first."""
    for width in map(int, args.widths):
        for kind in KINDS:
            model = [*args.overrides, *_at_width(base, width, kind, args.base_width or int(args.widths[0]))]
            options = {"train.max_iters": args.steps, "hooks": "[coordinates]", "schedule": "constant"}
            yield _point(f"{kind}-{width}", model, options, args.steps, kind, width, base.optimizer.learning_rate)
            for rate in args.transfer:
                steps = args.transfer_steps
                options = {"train.max_iters": steps, "optimizer.learning_rate": f"{rate:g}"}
                yield _point(f"{kind}-{width}-lr-{rate:g}", model, options, steps, kind, width, rate)


def _point(
    name: str, model: Sequence[str], options: dict[str, Any], steps: int, kind: str, width: int, rate: float
) -> StudyPoint:
    # A tenth of the steps, so that no large learning rate meets the initial weights; none for the coordinate check.
    warmup = 0 if "hooks" in options else steps // 10
    more = {**FIXED, **options, "optimizer.warmup_iters": warmup}
    overrides = [*model, *(f"{key}={value}" for key, value in more.items())]
    compose(overrides, ranks=1)
    columns = {"parametrization": kind, "width": width, "learning_rate": rate, "steps": steps}
    return StudyPoint(name, tuple(overrides), ("-n", "1"), columns)


def _at_width(base: Config, width: int, kind: str, unchanged: int) -> list[str]:
    """Return the overrides for a model of this width: hidden units grow with it, and the number of heads is the same.

    muP changes nothing at the width ``unchanged``.
    """
    cfg = base.transformer
    overrides = [f"model.n_embd={width}", f"model.mup={KINDS[kind]}"]
    if (hidden := cfg.hidden_at(width)) is not None:
        overrides.append(f"model.n_hidden={hidden}")
    if kind == "mup":
        overrides.append(f"model.mup_base_width={unchanged}")
    return overrides


def measured(point: StudyPoint, run: RunRecord) -> dict[str, Any]:
    """Return the columns of a finished run: the loss over the last tenth of the steps, and the last measurements.

    Raises:
        UserError: its metrics are incomplete.
    """
    found = metrics.read(run.path)
    if "loss" not in found.training:
        raise UserError("it logged no loss")
    losses = found.training["loss"]
    last = losses[-max(1, len(losses) // 10) :]
    names = [name for name in found.other.columns if name.partition("/")[0] in coord_page.MEASURES]
    return {"loss": sum(last) / len(last), **{name: found.other.last(name) for name in names}}
