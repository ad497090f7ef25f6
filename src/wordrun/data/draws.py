"""What a dataset's code draws from the random generators of the process: those of Python, NumPy and torch.

All threads share these generators, so a thread that reads examples ahead would draw from them in an order that depends
on time, between what dropout draws for the steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore the states of the generators at the end of a ``with`` block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_all(key: str) -> None:
    """Seed the generators with a hash of ``key``; those of accelerators, which are slow to seed, are left alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(np.frombuffer(digest, dtype="<u4").astype(np.uint32))
    torch.default_generator.manual_seed(number)


def watched(read: Callable[[], T]) -> tuple[T, bool]:
    """Return the result of ``read``, and whether it changed a generator, which is restored."""
    with preserved():
        before = _comparable()
        return read(), _comparable() != before


def _comparable() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    _, keys, *rest = numpy_state
    return random.getstate(), keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()
