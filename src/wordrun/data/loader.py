"""Loads batches: a thread builds the batches of the next steps while the current step computes."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from wordrun.common.errors import ConfigError

CLOSE_S = 1.0
"""Seconds that close() waits for the thread, which may hang in a file system; the thread is a daemon."""

_Position = tuple[int, int]
"""The index in the run of a step's first example, and the step's number of micro-steps."""


class Ordered(Protocol):
    """The training examples of a run, by index."""

    per_epoch: int
    """Examples per epoch."""

    @property
    def unit(self) -> str:
        """What the examples are called in messages."""

    def empty(self, size: int, *, pinned: bool = False) -> Any:
        """Return an uninitialized batch of ``size`` examples, a ``TensorBatch``."""

    def fill(self, first: int, batch: Any) -> None:
        """Overwrite ``batch`` with the run's examples starting at index ``first``."""


@dataclass
class _Slot:
    """Buffers for the batches of one step."""

    batches: list[Any]
    copied: torch.Event | None = None
    """Recorded after the copy to the device; the buffers may then be overwritten."""

    def to(self, device: torch.device) -> list[Any]:
        """Return copies of the batches on ``device``, which may not be complete yet."""
        copies = [batch.to(device) for batch in self.batches]
        self.copied = torch.Event(device)
        self.copied.record()
        return copies


@dataclass
class _Builder:
    """Builds this rank's batches for any step, in a thread that holds no reference to the loader."""

    order: Ordered
    size: int
    rank: int
    ranks: int
    pinned: bool
    prefetch: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    wanted: _Position | None = None
    """The next batches; None before the first request."""
    ready: dict[_Position, _Slot] = field(default_factory=dict)
    free: list[_Slot] = field(default_factory=list)
    """Slots whose batches have been copied to the device, or will not be needed."""
    failure: BaseException | None = None
    closed: bool = False
    thread: threading.Thread | None = None

    def build(self, position: _Position, slot: _Slot | None = None) -> _Slot:
        """Return the batches at ``position``, in the buffers of ``slot`` if given."""
        first, gas = position
        if slot is None:
            slot = _Slot([self.order.empty(self.size, pinned=self.pinned) for _ in range(gas)])
        elif slot.copied is not None:
            slot.copied.synchronize()
        for micro, batch in enumerate(slot.batches):
            self.order.fill(first + (micro * self.ranks + self.rank) * self.size, batch)
            if (scale := getattr(batch, "scale", None)) is not None:
                # One factor for the whole step, so that its loss is the mean over all predicted tokens.
                count = self.examples(gas)
                scale.fill_(self.order.scale(first, count))  # type: ignore[attr-defined]
        return slot

    def take_free(self, gas: int) -> _Slot | None:
        """Return a free slot for ``gas`` micro-steps, if there is one, and drop those of another size.

        The caller holds the condition.
        """
        self.free = [slot for slot in self.free if len(slot.batches) == gas]
        return self.free.pop() if self.free else None

    def on_demand(self, position: _Position) -> _Slot:
        """Return the batches at ``position``, built in this thread."""
        with self.condition:
            slot = self.take_free(position[1])
        return self.build(position, slot)

    def examples(self, gas: int) -> int:
        """Return the number of examples that all ranks take in a step of ``gas`` micro-steps."""
        return gas * self.ranks * self.size

    def prefetched(self, position: _Position) -> _Slot:
        """Return the batches at ``position`` from the thread."""
        with self.condition:
            if self.thread is None:
                # A daemon, so the process can exit without waiting for it.
                self.thread = threading.Thread(target=self._run, name="wordrun-loader", daemon=True)
                self.thread.start()
            if position not in self.ready:  # if it is ready, waking the thread once, below, is enough
                self.wanted = position
                self.condition.notify_all()
            while position not in self.ready:
                if self.failure is not None:
                    raise self.failure
                self.condition.wait()
            self.wanted = self._ahead(position, 1)
            self.condition.notify_all()
            return self.ready.pop(position)

    def _ahead(self, position: _Position, steps: int) -> _Position:
        """Return the position ``steps`` steps after ``position``."""
        first, gas = position
        return first + steps * self.examples(gas), gas

    def close(self) -> None:
        """Stop the thread."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(CLOSE_S)

    def _run(self) -> None:
        """Build upcoming batches until the loader is closed."""
        try:
            while (next_ := self._next()) is not None:
                position, slot = next_
                slot = self.build(position, slot)
                with self.condition:
                    self.ready[position] = slot
                    self.condition.notify_all()
        except BaseException as error:  # any error must reach the caller that waits for the batch
            with self.condition:
                self.failure = error
                self.condition.notify_all()

    def _next(self) -> tuple[_Position, _Slot | None] | None:
        """Return the next position to build and its buffers; None if the loader is closed."""
        with self.condition:
            while not self.closed:
                near = [self._ahead(self.wanted, n) for n in range(self.prefetch)] if self.wanted else []
                for position in [position for position in self.ready if position not in near]:  # stale after a jump
                    self.free.append(self.ready.pop(position))
                if missing := [position for position in near if position not in self.ready]:
                    return missing[0], self.take_free(missing[0][1])
                self.condition.wait()
        return None


class Loader:
    """One rank's batches for any step, on the device.

    The batches of a step depend only on the examples taken before it and on its size. The thread prefetches from the
    last requested step; jumping to any other step works, but waits for its batches to be built.

    Args:
        order: the run's training examples.
        batch_size: examples per rank and micro-step.
        gas: micro-steps per step, unless a call says otherwise.
        rank: this rank's index among the data-parallel ranks.
        ranks: number of data-parallel ranks.
        device: where to put the batches; None: the CPU.
        prefetch: number of steps to prefetch; 0 uses no thread.
    """

    def __init__(
        self,
        order: Ordered,
        batch_size: int,
        gas: int = 1,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | None = None,
        prefetch: int = 2,
    ) -> None:
        if order.per_epoch < ranks:
            raise ConfigError(
                f"the training data has {order.per_epoch:,} {order.unit}, fewer than the {ranks} data-parallel ranks: "
                "use fewer ranks or more data, and for text a smaller model.block_size"
            )
        self.device = device or torch.device("cpu")
        pinned = self.device.type != "cpu"
        self.gas = gas
        self._builder = _Builder(order, batch_size, rank, ranks, pinned, prefetch)
        self.close = weakref.finalize(self, self._builder.close)
        """Stops the thread, as does garbage collection. A closed loader builds batches on demand."""

    def step(self, step: int) -> list[Any]:
        """Return this rank's batches of ``step``, if all steps have the same size."""
        return self.take(step * self._builder.examples(self.gas), self.gas)

    def take(self, first: int, gas: int) -> list[Any]:
        """Return this rank's batches of the step that begins with the run's example ``first``, one per micro-step.

        The step consumes the next batch_size x ranks x gas examples of the run. How they are assigned to ranks and
        micro-steps does not change the update.
        """
        builder, position = self._builder, (first, gas)
        prefetched = builder.prefetch and self.close.alive
        slot = builder.prefetched(position) if prefetched else builder.on_demand(position)
        if self.device.type == "cpu":
            return slot.batches
        batches = slot.to(self.device)
        with builder.condition:
            builder.free.append(slot)
        return batches
