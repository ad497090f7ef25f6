"""Datasets of one's own: random ones are repeatable, examples with other fields are batches, and others are refused."""

from __future__ import annotations

import json
import random
import shlex
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wordrun
from wordrun.common.errors import ConfigError, UserError
from wordrun.config.registry import Part, parts
from wordrun.config.schema import Config
from wordrun.data.batch import TensorBatch
from wordrun.data.examples import ExampleOrder, Reader, Splits, ValidationExamples, preserved
from wordrun.data.loader import Loader
from wordrun.data.options import DataConfig
from wordrun.model.options import ModelConfig

WHAT = "training split of data=waves"


class Noisy:
    """Draws from all generators of the process."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return index + torch.rand(1), random.random() + np.random.rand()


@dataclass(frozen=True)
class Weighted(TensorBatch):
    """A batch of one's own."""

    x: Tensor
    y: Tensor
    weight: Tensor
    unit: str = "m"


def read(items: Any, **options: Any) -> Any:
    reader = Reader(items, WHAT, **options)
    batch = reader.empty(len(items))
    reader.fill(batch, np.arange(len(items)), str)
    return batch


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [
        ((0.0, 1), (0.0, 0.5), "a float32 target, but the first example's is int64: .* for all, such as float\\(y\\)"),
        ((0.0, True), (0.0, 3), "an int64 target, but the first example's is bool: .*, such as int64"),
        ((0.0, np.int32(1)), (0.0, 2**40), "an int64 target, but the first example's is int32"),
        ((0, 1.0), (0.5, 1.0), "a float32 input, but the first example's is int64"),
        ((0.0, 1.0), (0.0, 1j), "a complex64 target, but the first example's is float32"),
        ((torch.zeros(2).half(), 1), (torch.zeros(2), 1), "a float32 input, but the first example's is float16"),
        ((torch.zeros(2).half(), 1), (torch.zeros(2).bfloat16(), 1), "a bfloat16 input, but .* is float16"),
        ((0.0, np.uint16(1)), (0.0, 1), "an int64 target, but the first example's is uint16"),
    ],
)
def test_a_value_that_another_type_would_change_is_refused(first: Any, other: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"example 2 of the {WHAT} has {says}"):
        read([first, first, other])


@pytest.mark.parametrize(
    ("first", "other"), [((0.5, 0.5), (1, np.float64(2))), ((0.5, 3), (0, True)), ((1j, 0.5), (np.complex128(1), 2))]
)
def test_a_value_of_a_type_that_fits_is_accepted(first: Any, other: Any) -> None:
    batch = read([first, other])
    assert (batch.inputs[1], batch.targets[1]) == other


def test_random_examples_depend_on_the_seed_and_their_position_alone() -> None:
    def order(seed: int = 7) -> ExampleOrder:
        return ExampleOrder(Reader(Noisy(), WHAT, threads=2), seed)

    with preserved():
        expected = random.random(), np.random.rand(), torch.rand(1)
    (whole,) = Loader(order(), 8, prefetch=0).step(4)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    halves = [Loader(order(), 4, rank=rank, ranks=2, prefetch=0).step(4)[0] for rank in range(2)]
    for name in ("inputs", "targets"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(whole, name))
    assert not torch.equal(whole.inputs, Loader(order(8), 8, prefetch=0).step(4)[0].inputs)
    one_epoch = order().reader.empty(24)
    epochs = []
    for first in (0, 24):
        order().fill(first, one_epoch)
        epochs.append(sorted((one_epoch.inputs % 1).flatten().tolist()))
    assert len({*epochs[0], *epochs[1]}) == 48  # other draws in each epoch
    first_, second = (ValidationExamples(Reader(Noisy(), "validation split"), 8, None)[1][0] for _ in range(2))
    assert torch.equal(first_.inputs, second.inputs)


def test_an_augment_may_ignore_its_generator() -> None:
    def augment(x: Tensor, rng: np.random.Generator) -> Tensor:
        return x + torch.rand(1)

    split = torch.utils.data.TensorDataset(torch.zeros(8, 1), torch.zeros(8))
    order = ExampleOrder(Reader(split, WHAT), 1, augment)
    first, second = (Loader(order, 8, prefetch=0).step(0)[0].inputs for _ in range(2))
    assert torch.equal(first, second)
    assert len(set(first.flatten().tolist())) == 8


class Readers:
    """Notes which threads read examples."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        return torch.zeros(1), 0.0


def test_examples_are_read_beside_the_steps_only_if_they_are_declared_not_to_draw(
    own: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for draws in (True, False):
        data = Readers()
        splits = Splits(data, Noisy(), {"inputs": 1}, threads=2, draws=draws)
        monkeypatch.setattr(sys.modules[__name__], "noisy", lambda _, splits=splits: splits)
        with wordrun.Trainer(replace(own, run_dir=f"{draws}")) as trainer:
            data.threads.clear()
            trainer.train()
        names.append(data.threads)
        assert ("Splits(draws=False) reads ahead" in Path(f"{draws}/log.txt").read_text()) is draws
    assert names == [{""}, {"wordrun-examples"}]


@dataclass
class NetConfig(ModelConfig):
    """A model with dropout."""

    name: str = "net"
    """Name of the preset; part of the run directory."""


class Net(nn.Module):
    def __init__(self, cfg: NetConfig, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def losses(self, batch: Any) -> Tensor:
        x, y = (batch.x, batch.y) if isinstance(batch, Weighted) else (batch.inputs, batch.targets)
        return (self.layers(x)[:, 0] - y).square()


@dataclass
class NoisyConfig(DataConfig):
    """Random examples."""


def noisy(data: Any) -> Splits:
    return Splits(Noisy(), Noisy(), {"inputs": 1})


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Config:
    for kind, options, name in (("model", NetConfig, "Net"), ("data", NoisyConfig, "noisy")):
        monkeypatch.setitem(parts(kind), name.lower(), Part(options, f"{__name__}:{name}", kind, name.lower(), "x.py"))
    cfg = wordrun.compose(
        shlex.split("""
        tracker=jsonl train.device=cpu train.dtype=fp32 train.max_iters=6 train.eval_interval=2
        train.log_interval=1 train.checkpoint_interval=3 train.save_best=false hydra.run.dir=whole
    """)
    )
    cfg.model, cfg.data = NetConfig(batch_size=4), NoisyConfig("noisy", "noisy")
    return cfg


def test_a_run_over_random_examples_is_resumed_exactly(own: Config) -> None:
    def figures(run: str) -> list[Any]:
        found = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line.get("loss"), line.get("val_loss")) for line in found]

    with wordrun.Trainer(own) as trainer:
        trainer.train()
    assert Path("whole/log.txt").read_text().count("data noisy: each example is read with its own seed, ") == 1
    own.run_dir, own.train.resume = "again", "whole/checkpoints/step-00000003"
    with wordrun.Trainer(own) as trainer:
        trainer.train()
    assert figures("again") == figures("whole")


def test_examples_with_other_fields_are_batches_of_ones_own() -> None:
    items = [{"weight": 0.5, "x": [1.0, 2.0], "y": 1}, (np.zeros(2, np.float32), 2, 1.5)]
    batch = read(items, batch=Weighted)
    assert isinstance(batch, Weighted)
    assert (len(batch), batch.unit) == (2, "m")
    assert batch.x.tolist() == [[1, 2], [0, 0]]
    assert (batch.y.tolist(), batch.weight.tolist()) == ([1, 2], [0.5, 1.5])

    def augment(example: dict[str, Tensor], rng: np.random.Generator) -> dict[str, Tensor]:
        return {**example, "weight": example["y"] + rng.random()}

    order = ExampleOrder(Reader(items, WHAT, batch=Weighted), 1, augment)
    order.fill(0, batch)
    assert batch.weight.long().tolist() == batch.y.tolist()
    with pytest.raises(ConfigError, match=r"example 1 of the .* has a y of shape \[1\], but the first .* shape \[\]"):
        read([items[0], (np.zeros(2, np.float32), [2], 1.5)], batch=Weighted)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(2), 0.5


@pytest.mark.parametrize(
    ("items", "batch", "says"),
    [
        ([(0.0, 1, 2)], None, r"an input and a target: it is 3 values; return \(input, target\), or .* Splits\(batch="),
        ([{"x": 1, "m": 2}], None, "it is a dict with x, m; return"),
        ([({"x": 1, "m": 2}, 0.5)], None, "its input is a dict with x, m, not a tensor, an array or a number; return"),
        ([(0.5, None)], None, "its target is None, not a tensor"),
        ([None], None, "it is None; return"),
        ([(0.0, 1)], Weighted, r"should have what Splits\(batch=Weighted\) has, x, y, weight: it is 2 values; return"),
        ([{"x": 1, "y": 1, "w": 1}], Weighted, "it is a dict with x, y, w; return them in this order, or a dict"),
        ([(0.0, 1, "a")], Weighted, "its weight is str, not a tensor"),
        (Stream(), None, f"the {WHAT} is of class Stream, which has no __len__ and no __getitem__: a dataset needs"),
        (iter([1]), None, "of class list_iterator, which has no __len__ and no __getitem__"),
    ],
)
def test_what_cannot_be_a_batch_is_one_message(items: Any, batch: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Reader(items, WHAT, batch=batch) if batch else Reader(items, WHAT)


def test_a_batch_without_fields_is_refused(own: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoFields(TensorBatch):
        x: Tensor  # without @dataclass

    splits = Splits([0], [0], batch=NoFields)
    monkeypatch.setattr(sys.modules[__name__], "noisy", lambda data: splits)
    with pytest.raises(UserError, match=r"data=noisy \(x.py\): Splits\(batch=NoFields\) should be a dataclass derived"):
        wordrun.Trainer(own)
