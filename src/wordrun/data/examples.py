"""Map-style datasets, such as images and their classes: batches, training order and validation set."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wordrun.common.errors import ConfigError
from wordrun.config.registry import Part
from wordrun.data.batch import TensorBatch
from wordrun.data.order import Permutation
from wordrun.data.validation_set import deal

Augment = Callable[[Any, np.random.Generator], Any]
"""Returns a randomly changed input. If ``Splits.batch`` is not ``Examples``, takes and returns a dict of the
example's fields. The generator depends only on the seed and the example's index in the run."""
Vary = Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Returns an example after ``Augment``, given its row in the batch and its fields."""
SINGULAR = {"inputs": "input", "targets": "target"}
"""What messages call the fields of ``Examples``."""


class Dataset(Protocol):
    """A map-style dataset, as torch's: examples are pairs of an input and a target, all inputs of the same shape.

    Examples may have other fields, if ``Splits.batch`` names them.
    """

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return an example: tensors, arrays or numbers."""


@dataclass(frozen=True)
class Examples(TensorBatch):
    """A batch of B pairs of an input and a target."""

    inputs: Tensor
    """(B, ...)"""
    targets: Tensor
    """(B, ...); for classes (B,) int64."""

    def cast(self, dtype: torch.dtype) -> Self:
        """Return the batch with inputs in ``dtype``; the loss needs its targets as they are."""
        return replace(self, inputs=self.inputs.to(dtype)) if self.inputs.is_floating_point() else self


@dataclass(frozen=True)
class Splits:
    """The data of a run, returned by the function of a data kind."""

    train: Dataset
    val: Dataset
    model: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's constructor besides its options, such as the number of ``classes``; JSON values."""
    origin: str = ""
    """Origin of the data, for the log and run.json."""
    augment: Augment | None = None
    """Applied to training inputs; if ``batch`` is another class than ``Examples``, to dicts of an example's fields."""
    threads: int = 1
    """Number of threads that read examples in parallel, if ``draws`` is false."""
    batch: type[TensorBatch] = Examples
    """Class of the batches, a dataclass with a field for each value of an example."""
    draws: bool = True
    """Whether reading an example, or ``augment``, may draw from the process's random generators: Python's, NumPy's and
    torch's. If so, they are seeded for each example, and examples are read between the steps, because steps also draw.
    """


class Reader:
    """Reads the examples of one split into batches.

    Args:
        dataset: the split.
        what: its name in messages.
        classes: number of classes, if the targets are classes.
        draws: whether reading an example may draw from the process's random generators.
        threads: number of threads that read examples in parallel, unless ``draws``.
        part: the part that made the dataset, for messages.
        batch: class of the batches, a dataclass; its fields without a default are what an example consists of.

    Raises:
        ConfigError: the dataset cannot be read by index, is empty, or its examples do not fit ``batch``.
    """

    first: tuple[Tensor, ...]
    """Example 0."""

    def __init__(
        self,
        dataset: Dataset,
        what: str,
        classes: int | None = None,
        *,
        draws: bool = True,
        threads: int = 1,
        part: Part | None = None,
        batch: type[TensorBatch] = Examples,
    ) -> None:
        self.dataset, self.what, self.classes, self.part, self.batch = dataset, what, classes, part, batch
        self.draws = draws
        self.fields = tuple(
            each.name for each in fields(batch) if each.default is MISSING and each.default_factory is MISSING
        )
        self._target = self.fields.index("targets") if classes is not None and "targets" in self.fields else None
        self._check_indexed()
        if not len(dataset):
            raise ConfigError(f"the {what} has no examples")
        self.pool = ThreadPoolExecutor(threads, "wordrun-examples") if threads > 1 and not draws else None
        with self.blamed(0), preserved():
            self.first = self[0]
        self.shapes = [(each.shape, each.dtype) for each in self.first]

    def _check_indexed(self) -> None:
        missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(self.dataset), name)]
        if isinstance(self.dataset, torch.utils.data.IterableDataset):  # inherits a __getitem__ that fails
            missing = list(dict.fromkeys([*missing, "__getitem__"]))
        if missing:
            raise ConfigError(
                f"the {self.what} is of class {type(self.dataset).__name__}, which has no {' and no '.join(missing)}: "
                "a dataset needs __len__ and __getitem__(index), because a run reads its examples by index, in its "
                "own order",
                page="tasks.md#your-own-examples",
            )

    def blamed(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Return a ``with`` block in which exceptions name the data's part and example ``index``."""
        return self.part.blamed(f" on example {index} of the {self.what}") if self.part else contextlib.nullcontext()

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return the fields of an example, in the order of the batch's class."""
        example = self.dataset[index]
        if isinstance(example, Mapping) and example.keys() == {*self.fields}:
            example = [example[name] for name in self.fields]
        if not isinstance(example, tuple | list) or len(example) != len(self.fields):
            raise ConfigError(
                f"example {index} of the {self.what} {self._refusal(f'it is {_described(example)}')}",
                page="tasks.md#your-own-batches",
            )
        try:
            found = tuple(map(torch.as_tensor, example))
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"example {index} of the {self.what} {self._refusal(self._no_tensor(example))}") from None
        if self._target is not None:
            self._check_class(index, found[self._target])
        return found

    def _refusal(self, found: str) -> str:
        """Return what an example should be, what it is instead, and the remedy."""
        if self.batch is Examples:
            return (
                f"should be an input and a target: {found}; return (input, target), or name the fields of other "
                "examples with Splits(batch=...)"
            )
        names = ", ".join(self.fields)
        return (
            f"should have what Splits(batch={self.batch.__name__}) has, {names}: {found}; return them in this order, "
            "or a dict with these keys"
        )

    def _no_tensor(self, example: Sequence[Any]) -> str:
        """Return which value of ``example`` cannot be made a tensor, for a message."""
        for name, value in zip(self.fields, example, strict=True):
            try:
                torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                return f"its {SINGULAR.get(name, name)} is {_described(value)}, not a tensor, an array or a number"
        raise AssertionError("each value is a tensor on its own")

    def _check_class(self, index: int, target: Tensor) -> None:
        is_class = not (target.dim() or target.is_floating_point())
        if self.classes is not None and not (is_class and 0 <= target < self.classes):
            raise ConfigError(
                f"example {index} of the {self.what} has the label {target.tolist()}, but there are {self.classes} "
                f"classes (integers from 0 to {self.classes - 1}): correct the label, or the number of classes"
            )

    def empty(self, size: int, *, pinned: bool = False) -> Any:
        """Return an uninitialized batch of ``size`` examples."""
        tensors = (torch.empty(size, *shape, dtype=dtype, pin_memory=pinned) for shape, dtype in self.shapes)
        return self.batch(**dict(zip(self.fields, tensors, strict=True)))

    def fill(self, batch: Any, indices: NDArray[np.int64], key: Callable[[int], str], vary: Vary | None = None) -> None:
        """Overwrite ``batch`` with the examples at ``indices``.

        Args:
            batch: what ``empty`` returned.
            indices: of the examples in the dataset.
            key: returns the seed of the process's random generators for reading a row, if examples draw
                from them; they are restored at the end. No other thread may use them.
            vary: changes an example, given its row.
        """
        rows = [getattr(batch, name) for name in self.fields]

        def read(row: int, index: int) -> None:
            with self.blamed(index):
                if self.draws:
                    seed_all(key(row))
                example = self[index]
                for at, (each, (shape, dtype)) in enumerate(zip(example, self.shapes, strict=True)):
                    if each.shape != shape or each.dtype != dtype:
                        self._check_form(index, at, each)
                if vary is not None:
                    example = vary(row, example)
                for tensor, each in zip(rows, example, strict=True):
                    tensor[row] = each

        with preserved() if self.draws else contextlib.nullcontext():
            # list() raises the first exception of a thread.
            list((self.pool.map if self.pool else map)(read, range(len(indices)), indices.tolist()))

    def _check_form(self, index: int, at: int, found: Tensor) -> None:
        """Raise a ConfigError if the example's value ``found`` of field ``at`` does not fit into a batch."""
        name, (shape, dtype) = SINGULAR.get(self.fields[at], self.fields[at]), self.shapes[at]
        if found.shape != shape:
            article = "an" if name[0] in "aeiou" else "a"
            raise ConfigError(
                f"example {index} of the {self.what} has {article} {name} of shape {list(found.shape)}, but the first "
                f"example's has shape {list(shape)}: all should have the same"
            )
        if _loses(found.dtype, dtype):
            theirs, first = (str(each).removeprefix("torch.") for each in (found.dtype, dtype))
            such = "float(y)" if name == "target" and not found.dim() and found.is_floating_point() else theirs
            article = "an" if theirs[0] in "aeiou" else "a"
            raise ConfigError(
                f"example {index} of the {self.what} has {article} {theirs} {name}, but the first example's is "
                f"{first}: return the same type for all, such as {such}"
            )


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore the states of the process's random generators at the end of a ``with`` block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_all(key: str) -> None:
    """Seed the generators with a hash of ``key``; those of accelerators, which are slow to seed, are left alone."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    random.seed(number)
    np.random.seed(number % 2**32)  # an integer, which takes 1 us; an array would take 7
    torch.default_generator.manual_seed(number)


def _described(value: Any) -> str:
    """Return what ``value`` is, for a message."""
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value))}" if value else "an empty dict"
    return "None" if value is None else type(value).__name__


def _loses(found: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` cannot hold all values of type ``found``; rounding to fp32 does not count."""
    if (found.is_floating_point and dtype == torch.float32) or (found.is_complex and dtype == torch.complex64):
        return False
    try:
        return torch.promote_types(found, dtype) != dtype
    except RuntimeError:  # rare types, such as uint16, have no common one
        return True


class ExampleOrder:
    """The training examples of a run by index, a function of the seed and the index alone.

    Each epoch visits every example once, in a new shuffled order.
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

    def empty(self, size: int, *, pinned: bool = False) -> Any:
        """Return an uninitialized batch of ``size`` examples."""
        return self.reader.empty(size, pinned=pinned)

    def fill(self, first: int, batch: Any) -> None:
        """Overwrite ``batch`` with the run's examples starting at index ``first``."""
        vary: Vary | None = None
        if self.augment is not None:
            vary = lambda row, example: self._varied(first + row, example)  # noqa: E731
        # The position in the run determines the epoch and the example.
        self.reader.fill(batch, self.indices(first, len(batch)), lambda row: f"{self.seed}/{first + row}", vary)

    def _varied(self, index: int, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the run's example ``index`` after ``augment``."""
        assert self.augment is not None
        # A counter-based generator: the same values for any number of ranks, and after a resume.
        rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], dtype=np.uint64)))
        if self.reader.batch is Examples:
            inputs, targets = example
            return self.augment(inputs, rng), targets
        varied = self.augment(dict(zip(self.reader.fields, example, strict=True)), rng)
        return tuple(varied[name] for name in self.reader.fields)


class ValidationExamples:
    """The validation set: ``count`` examples (None: all), spread evenly over the split and dealt to the ranks."""

    def __init__(self, reader: Reader, batch_size: int, count: int | None, rank: int = 0, size: int = 1) -> None:
        available = len(reader.dataset)
        n = available if count is None else min(available, count)
        chosen, counts = deal(n, batch_size, rank, size)
        self.reader, self.batch_size = reader, batch_size
        self.indices, self.weights = chosen * available // n, counts.astype(np.float64)

    def __len__(self) -> int:
        return len(self.indices) // self.batch_size

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        """Return this rank's i-th batch and the weight of each of its examples: 1, or 0 for padding."""
        part = slice(i * self.batch_size, (i + 1) * self.batch_size)
        batch, indices = self.reader.empty(self.batch_size), self.indices[part]
        # The same in every evaluation and on any number of ranks.
        self.reader.fill(batch, indices, lambda row: f"validation/{indices[row]}")
        return batch, torch.from_numpy(self.weights[part])
