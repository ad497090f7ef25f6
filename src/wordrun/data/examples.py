"""Data that consist of examples with an index, such as images and their classes: batches, order, validation set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wordrun.data.fixed_set import deal
from wordrun.data.order import Permutation
from wordrun.data.tensor_batch import TensorBatch
from wordrun.errors import ConfigError
from wordrun.registry import Part

Augment = Callable[[Tensor, np.random.Generator], Tensor]
"""Returns a random variation of an input; the generator depends only on the seed and the example's index in the run."""


class Dataset(Protocol):
    """A map-style dataset, as torch's: examples are pairs of an input and a target, all inputs of the same shape."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Return an example: tensors, arrays or numbers."""


@dataclass(frozen=True)
class Splits:
    """The data of a run, returned by the function of a data kind."""

    train: Dataset
    val: Dataset
    model: dict[str, Any] = field(default_factory=dict)
    """What the model's constructor takes besides its options, JSON-serializable, such as the number of ``classes``."""
    origin: str = ""
    """Origin of the data, for the log and run.json."""
    augment: Augment | None = None
    """Applied to the inputs of training examples."""
    threads: int = 1
    """Threads that read examples at the same time."""


@dataclass(frozen=True)
class Examples(TensorBatch):
    """A batch of B pairs of an input and a target."""

    inputs: Tensor
    """(B, ...)"""
    targets: Tensor
    """(B, ...); for classes (B,) int64."""

    def __len__(self) -> int:
        return len(self.inputs)

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the batch with inputs in ``dtype``; the loss needs its targets as they are."""
        return replace(self, inputs=self.inputs.to(dtype)) if self.inputs.is_floating_point() else self


class Reader:
    """Reads the examples of one split into batches.

    Args:
        dataset: the split.
        what: its name in messages.
        classes: number of classes, if the targets are classes.
        threads: threads that read examples at the same time.
        part: the part that has made the dataset, to be named if reading fails.
    """

    def __init__(
        self, dataset: Dataset, what: str, classes: int | None = None, threads: int = 1, part: Part | None = None
    ) -> None:
        self.dataset, self.what, self.classes, self.part = dataset, what, classes, part
        if not len(dataset):
            raise ConfigError(f"the {what} has no examples")
        self.pool = ThreadPoolExecutor(threads, "wordrun-examples") if threads > 1 else None
        with self._blamed(0):
            self.shapes = [(each.shape, each.dtype) for each in self[0]]

    def _blamed(self, index: int) -> contextlib.AbstractContextManager[None]:
        return self.part.blamed(f" on example {index} of the {self.what}") if self.part else contextlib.nullcontext()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        example = self.dataset[index]
        if not isinstance(example, tuple | list) or len(example) != 2:
            found = f"{len(example)} values" if isinstance(example, tuple | list) else type(example).__name__
            raise ConfigError(f"example {index} of the {self.what} should be an input and a target: it is {found}")
        inputs, target = map(torch.as_tensor, example)
        is_class = not (target.dim() or target.is_floating_point())
        if self.classes is not None and not (is_class and 0 <= target < self.classes):
            raise ConfigError(
                f"example {index} of the {self.what} has the label {target.tolist()}, but there are {self.classes} "
                f"classes (integers from 0 to {self.classes - 1}): correct the label, or the number of classes"
            )
        return inputs, target

    def empty(self, size: int, *, pinned: bool = False) -> Examples:
        """Return an uninitialized batch of ``size`` examples."""
        return Examples(*(torch.empty(size, *s, dtype=dtype, pin_memory=pinned) for s, dtype in self.shapes))

    def fill(self, batch: Examples, indices: NDArray[np.int64], vary: Callable[[int, Tensor], Tensor]) -> None:
        """Overwrite ``batch`` with the examples at ``indices``; ``vary`` changes an input, given its row."""

        def read(row: int, index: int) -> None:
            with self._blamed(index):
                inputs, target = self[index]
                for what, each, (shape, _) in zip(("an input", "a target"), (inputs, target), self.shapes, strict=True):
                    if each.shape != shape:
                        raise ConfigError(
                            f"example {index} of the {self.what} has {what} of shape {list(each.shape)}, but the first "
                            f"example's has shape {list(shape)}: all should have the same"
                        )
                batch.inputs[row], batch.targets[row] = vary(row, inputs), target

        # The list raises what a thread has raised.
        list((self.pool.map if self.pool else map)(read, range(len(indices)), indices.tolist()))


class ExampleOrder:
    """The training examples of a run by index, a function of the seed and the index alone.

    Each epoch visits every example once, in a shuffled order of its own.
    """

    unit = "examples"

    def __init__(self, reader: Reader, seed: int, augment: Augment | None = None) -> None:
        self.reader, self.seed, self.augment = reader, seed, augment
        self.per_epoch = len(reader.dataset)
        self._epoch: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def indices(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the indices in the dataset of the run's ``count`` examples from index ``first`` on."""
        found: list[NDArray[np.int64]] = []
        while count:
            epoch, at = divmod(first, self.per_epoch)
            computed, order = self._epoch  # read once: another thread may replace it
            if computed != epoch:
                order = Permutation(self.per_epoch, f"{self.seed}/{epoch}")(np.arange(self.per_epoch))
                self._epoch = (epoch, order)
            found.append(order[at : at + count])
            first, count = first + len(found[-1]), count - len(found[-1])
        return np.concatenate(found)

    def empty(self, size: int, *, pinned: bool = False) -> Examples:
        """Return an uninitialized batch of ``size`` examples."""
        return self.reader.empty(size, pinned=pinned)

    def fill(self, first: int, batch: Examples) -> None:
        """Overwrite ``batch`` with the run's examples starting at index ``first``."""

        def vary(row: int, inputs: Tensor) -> Tensor:
            if self.augment is None:
                return inputs
            # Counter-based: the same for any number of ranks, and after a resume.
            key = np.array([self.seed, first + row], dtype=np.uint64)
            return self.augment(inputs, np.random.Generator(np.random.Philox(key=key)))

        self.reader.fill(batch, self.indices(first, len(batch)), vary)


class FixedExamples:
    """The validation set: ``count`` examples (None: all), spread evenly over the split and dealt to the ranks."""

    def __init__(self, reader: Reader, batch_size: int, count: int | None, rank: int = 0, size: int = 1) -> None:
        available = len(reader.dataset)
        n = available if count is None else min(available, count)
        chosen, counts = deal(n, batch_size, rank, size)
        self.reader, self.batch_size = reader, batch_size
        self.indices, self.weights = chosen * available // n, counts.astype(np.float64)

    def __len__(self) -> int:
        return len(self.indices) // self.batch_size

    def __getitem__(self, i: int) -> tuple[Examples, Tensor]:
        """Return this rank's i-th batch and the weight of each of its examples: 1, or 0 for padding."""
        part = slice(i * self.batch_size, (i + 1) * self.batch_size)
        batch = self.reader.empty(self.batch_size)
        self.reader.fill(batch, self.indices[part], lambda row, inputs: inputs)
        return batch, torch.from_numpy(self.weights[part])
