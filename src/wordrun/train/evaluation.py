"""Measures the loss and the metrics on the validation set, and checks the metrics before the first step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from wordrun.backend.base import Backend
from wordrun.common.errors import ConfigError, UserError, raise_all
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.common.suggestions import nearest
from wordrun.config.registry import part_of, parts
from wordrun.config.schema import Config
from wordrun.model.base import Model
from wordrun.train.metrics import MetricOfSums, ValidationSet, evaluate
from wordrun.train.task import Task


class Evaluation:
    """The evaluation of a run; every rank must call its methods."""

    def __init__(self, cfg: Config, task: Task, backend: Backend, validation: ValidationSet) -> None:
        self.cfg, self.task, self.backend, self.validation = cfg, task, backend, validation
        model = backend.parts[-1]
        self.own = None if type(model).metrics is Model.metrics else model
        """The model, if it has metrics of its own."""
        built = {name: parts("metrics")[name] for name in cfg.metrics if _is_of_sums(parts("metrics")[name].load())}
        self.of_sums: dict[str, MetricOfSums] = {name: part.build(cfg.metrics[name]) for name, part in built.items()}

    def measure(self, step: int) -> dict[str, float]:
        """Return what the fixed validation set gives: the mean loss as val_loss, and each metric as val_NAME."""
        found = self._means(len(self.validation))
        for name, value in found.items():
            if not math.isfinite(value) and math.isfinite(found["val_loss"]):
                LOGGER.warning("the metric %s is %s at step %d", name[4:], value, step, extra=FIRST_RANK)
        return found

    def try_one_batch(self) -> None:
        """Evaluate one batch before the first step, so that a failing metric is found before any step is taken.

        Raises:
            ConfigError: evaluations do not report such a metric.
            UserError: a metric is not a value for each example.
            PartError: a metric failed.
        """
        train = self.cfg.train
        wanted = [("train.best_metric", train.best_metric)]
        wanted += [(f"hooks.{name}.metric", hook.metric_needed) for name, hook in self.cfg.hooks.items()]
        wanted = [(option, name) for option, name in wanted if name not in ("", "val_loss")]
        if not train.eval_interval or not (wanted or self.own or self.cfg.metrics):
            return
        known = self._means(1)
        for option, name in wanted:
            if name not in known:
                raise ConfigError(
                    f"{option}={name}: evaluations do not report it{nearest(name, known)} ({', '.join(known)})",
                    page="extend/metric.md#a-metric",
                )

    def _means(self, batches: int) -> dict[str, float]:
        measure = self._metrics if self.own or self.cfg.metrics else None
        computed = {name: partial(self._compute, name) for name in self.of_sums}
        share = self.task.dp_rank, self.task.layout.dp
        found = evaluate(self.backend, self.validation, measure, batches, computed=computed, share=share)
        return {f"val_{name}": value for name, value in {**found, **self.task.derived(found)}.items()}

    def _compute(self, name: str, sums: Tensor) -> float:
        """Return the value of the metric ``name`` of these ``sums``; NaN where it divides by 0."""
        part = parts("metrics")[name]
        with part.blamed():
            try:
                value = self.of_sums[name].compute(sums)
            except ZeroDivisionError:
                return math.nan
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{part}: compute should return a number, not {shape}") from None

    def _metrics(self, batch: Any, outputs: Tensor) -> dict[str, Tensor]:
        """Return the values of the model's own metrics and of those in the config, by name."""
        values, size = dict[str, Tensor](), self.cfg.model.batch_size
        errors: list[UserError] = []
        if self.own is not None:
            part = part_of("model", self.cfg.model)
            with part.blamed():
                values = self.own.metrics(batch, outputs)
            for name, each in values.items():
                _check(f"{part}: metrics: {name}", name, each, size)
        for name, options in self.cfg.metrics.items():
            part = parts("metrics")[name]
            try:
                if (metric := self.of_sums.get(name)) is None:
                    values[name] = part.build(options, outputs, batch)
                    _check(str(part), name, values[name], size)
                else:
                    with part.blamed():
                        values[name] = metric.sums(outputs, batch)
                    _check(f"{part}: sums", name, values[name], size, of_sums=True)
            except UserError as error:
                errors.append(error)
        raise_all(errors)
        return values


def _is_of_sums(code: Any) -> bool:
    return isinstance(code, type) and issubclass(code, MetricOfSums)


def _check(what: str, name: str, value: Any, examples: int, *, of_sums: bool = False) -> None:
    """Raise a UserError unless ``value``, of the metric ``name``, has a value or a row for each example."""
    if name == "loss":
        raise UserError(f"{what}: the name is reserved for the loss; choose another name for the metric")
    right = isinstance(value, Tensor) and value.dim() == 1 + of_sums and len(value) == examples
    if not right:
        shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        wanted = (
            f"what each example adds to each sum, a tensor of shape [{examples}, number of sums]"
            if of_sums
            else f"one value per example, a tensor of shape [{examples}]"
        )
        raise UserError(f"{what} should return {wanted}, not {shape}")
