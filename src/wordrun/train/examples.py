"""The task of map-style datasets, whose examples have an index, such as images and their classes."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch

from wordrun import dist
from wordrun.common.errors import UserError
from wordrun.common.log import LOGGER
from wordrun.config.registry import part_of
from wordrun.config.schema import Config
from wordrun.data.batch import TensorBatch
from wordrun.data.examples import ExampleOrder, Reader, Splits, ValidationExamples
from wordrun.data.loader import Loader
from wordrun.dist.mesh import Layout
from wordrun.model.base import Model
from wordrun.model.construction import new_model
from wordrun.train.task import Task, flops_of


class ExamplesTask(Task):
    """The training and validation examples, and a model built with what the data say about them.

    Raises:
        UserError: the data are missing, damaged, or not of the classes that they declare.
    """

    order: ExampleOrder
    """The training examples."""

    data: Splits

    def __init__(self, cfg: Config, world: dist.World, layout: Layout, data: Splits, banner: str | None = None) -> None:
        super().__init__(cfg, world, layout, data, banner)
        part = part_of("data", cfg.data)
        self.arguments = self.data.model
        self.make_model = partial(new_model, cfg.model, **self.arguments)
        self.meta_model: Model = self.make_model()
        reader = partial(
            Reader,
            classes=self.arguments.get("classes"),
            draws=self.data.draws,
            threads=self.data.threads,
            part=part,
            batch=self.data.batch,
        )
        self.train = reader(self.data.train, f"training split of data={cfg.data.name}")
        self.val = reader(self.data.val, f"validation split of data={cfg.data.name}")
        self.order = ExampleOrder(self.train, cfg.train.seed, self.data.augment)
        self.flops_per_example = flops_of(self.make_model(), self.train.empty(1).to(torch.device("meta")))

    @classmethod
    def open(cls, cfg: Config, world: dist.World) -> Splits:
        """Return the data, which each rank opens in turn."""
        return open_in_turn(cfg, world)

    def loader(self, gas: int, device: torch.device) -> Loader:
        cfg = self.cfg
        # Examples that draw from the process's random generators are read between the steps, which also draw from them.
        prefetch = 0 if self.data.draws else cfg.data.prefetch
        return Loader(self.order, cfg.model.batch_size, gas, self.dp_rank, self.layout.dp, device, prefetch)

    def validation_set(self, count: int | None) -> ValidationExamples:
        return ValidationExamples(self.val, self.cfg.model.batch_size, count, self.dp_rank, self.layout.dp)

    def facts(self) -> dict[str, Any]:
        counts = {"train_examples": len(self.data.train), "val_examples": len(self.data.val)}
        data = {"origin": self.data.origin, "banner": self.banner, **self.arguments, **counts}
        return {"data": data, "parameters": self.meta_model.num_parameters()}

    def fixed(self) -> dict[str, Any]:
        return {"the number of training examples": len(self.data.train), "the data's shape": self.arguments}

    def manifest(self, position: int) -> dict[str, Any]:
        return {"model_arguments": self.arguments}

    def announce(self, examples: int) -> None:
        train, val = len(self.data.train), len(self.data.val)
        LOGGER.info(
            "data %s: %s%s training and %s validation examples; %.2f epochs",
            self.cfg.data.name,
            f"{self.data.origin}; " * bool(self.data.origin),
            f"{train:,}",
            f"{val:,}",
            examples / train,
        )
        if self.data.draws and (self.cfg.data.prefetch or self.data.threads > 1):
            LOGGER.info(
                "data %s: each example is read with its own seed, between the steps and in one thread; if reading "
                "draws from no random generator of the process, Splits(draws=False) reads ahead",
                self.cfg.data.name,
            )


def open_in_turn(cfg: Config, world: dist.World) -> Splits:
    """Return the run's data; every rank must call this.

    Rank 0 opens them first, because it may have to download them; then one rank of each node, as nodes may have disks
    of their own; then the others.

    Raises:
        UserError: the data's function does not return ``Splits``.
    """
    part = part_of("data", cfg.data)
    found: Splits | None = None
    for turn in (world.rank == 0, world.local_rank == 0, True):
        if turn and found is None:
            found = part.build(cfg.data)
            if not isinstance(found, Splits):
                raise UserError(f"{part} should return wordrun.data.examples.Splits, not {type(found).__name__}")
            if not issubclass(found.batch, TensorBatch) or not fields(found.batch):
                raise UserError(
                    f"{part}: Splits(batch={found.batch.__name__}) should be a dataclass derived from "
                    "wordrun.data.batch.TensorBatch, with a field for each value of an example"
                )
        dist.broadcast(None, world)
    assert found is not None
    return found
