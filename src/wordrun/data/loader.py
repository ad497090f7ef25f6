"""Loads batches: a thread prepares those of the next steps while the current step computes."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch

from wordrun.data.batch import Batch
from wordrun.data.order import Order
from wordrun.errors import ConfigError

CLOSE_S = 1.0
"""Seconds that closing waits for the thread, which may hang in a file system; it does not keep the process alive."""


@dataclass
class _Slot:
    """The buffers of one step's batches."""

    batches: list[Batch]
    copied: torch.Event | None = None
    """Recorded when the batches are on the device, after which they may be overwritten."""


@dataclass
class _Builder:
    """Builds this rank's batches of any step, in a thread that holds no reference to the loader."""

    order: Order
    size: int
    gas: int
    rank: int
    ranks: int
    pinned: bool
    eot: int | None
    prefetch: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    wanted: int = -1
    """The next step; -1: none has been requested."""
    ready: dict[int, _Slot] = field(default_factory=dict)
    free: list[_Slot] = field(default_factory=list)
    failure: BaseException | None = None
    closed: bool = False
    thread: threading.Thread | None = None

    def build(self, step: int, slot: _Slot | None = None) -> _Slot:
        """Return the batches of ``step``, in the buffers of ``slot`` if it is given."""
        if slot is None:
            shape = self.size, self.order.block_size
            slot = _Slot([Batch.empty(*shape, pinned=self.pinned, eot=self.eot) for _ in range(self.gas)])
        elif slot.copied is not None:
            slot.copied.synchronize()
        for micro, batch in enumerate(slot.batches):
            self.order.fill(((step * self.gas + micro) * self.ranks + self.rank) * self.size, batch)
        return slot

    def prefetched(self, step: int) -> _Slot:
        """Return the batches of ``step``, which the thread builds."""
        with self.condition:
            if self.thread is None:
                # A daemon: the process may end at any time without waiting for it.
                self.thread = threading.Thread(target=self._run, name="wordrun-loader", daemon=True)
                self.thread.start()
            self.wanted = step
            self.condition.notify_all()
            while step not in self.ready:
                if self.failure is not None:
                    raise self.failure
                self.condition.wait()
            self.wanted = step + 1
            self.condition.notify_all()
            return self.ready.pop(step)

    def close(self) -> None:
        """End the thread."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(CLOSE_S)

    def _run(self) -> None:
        """Build the batches that will be needed next, until the loader is closed."""
        try:
            while (next_ := self._next()) is not None:
                step, slot = next_
                slot = self.build(step, slot)
                with self.condition:
                    self.ready[step] = slot
                    self.condition.notify_all()
        except BaseException as error:  # whatever it is, the caller that waits for the batch must see it
            with self.condition:
                self.failure = error
                self.condition.notify_all()

    def _next(self) -> tuple[int, _Slot | None] | None:
        """Return the step to be built next and the buffers for it; None: the loader is closed."""
        with self.condition:
            while not self.closed:
                near = range(self.wanted, self.wanted + self.prefetch) if self.wanted >= 0 else range(0)
                for step in [step for step in self.ready if step not in near]:  # left behind by a jump
                    self.free.append(self.ready.pop(step))
                missing = [step for step in near if step not in self.ready]
                if missing:
                    return missing[0], self.free.pop() if self.free else None
                self.condition.wait()
        return None


class Loader:
    """One rank's batches of any step, on the device.

    The batches of a step are a function of its number. The thread continues from the step that was requested last; a
    jump to any other step works, but waits until that one is built.

    Args:
        order: the sequences of the run.
        batch_size: sequences per rank and micro-step.
        gas: micro-steps.
        rank: this rank's index among the data-parallel ranks.
        ranks: their number.
        device: where to put the batches; None: the CPU.
        prefetch: number of steps whose batches are prepared in advance; 0: none, and no thread.
        eot: the end-of-text token, if attention is confined to documents.
    """

    def __init__(
        self, order: Order, batch_size: int, gas: int = 1, rank: int = 0, ranks: int = 1,
        device: torch.device | None = None, prefetch: int = 2, eot: int | None = None,
    ) -> None:  # fmt: skip
        if order.per_epoch < ranks:
            raise ConfigError(
                f"the training text has {order.per_epoch:,} sequences of model.block_size={order.block_size}, fewer "
                f"than the {ranks} data-parallel ranks: use fewer ranks, a smaller model.block_size, or more text"
            )
        self.device = device or torch.device("cpu")
        pinned = self.device.type != "cpu"
        self._builder = _Builder(order, batch_size, gas, rank, ranks, pinned, eot, prefetch)
        self.close = weakref.finalize(self, self._builder.close)
        """Ends the thread; so does garbage collection. A closed loader builds batches when they are requested."""

    def step(self, step: int) -> list[Batch]:
        """Return this rank's share of the sequences of ``step``, a batch for each micro-step.

        The step takes the next batch_size x ranks x gas sequences of the run. Which rank and which micro-step gets
        which of them does not change what the step learns.
        """
        builder = self._builder
        slot = builder.prefetched(step) if builder.prefetch and self.close.alive else builder.build(step)
        if self.device.type == "cpu":
            return slot.batches
        batches = [batch.to(self.device) for batch in slot.batches]
        slot.copied = torch.Event(self.device)
        slot.copied.record()
        with builder.condition:
            builder.free.append(slot)
        return batches
