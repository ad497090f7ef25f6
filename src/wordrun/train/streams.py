"""The random streams of this process, as one thing that can be kept and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's random streams, those of devices in use included."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    for name in ("cuda", "xpu"):
        device: Any = getattr(torch, name)
        if device.is_available() and device.is_initialized():
            state[name] = device.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put the random streams back to where ``capture`` found them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for name in ("cuda", "xpu"):
        if name in state:
            getattr(torch, name).set_rng_state_all(state[name])


@contextlib.contextmanager
def swapped(state: dict[str, Any]) -> Iterator[None]:
    """Draw from ``state`` in a ``with`` block, keep in it how far that went, and leave the caller's streams alone."""
    outer = capture()
    restore(state)
    try:
        yield
    finally:
        state.update(capture())
        restore(outer)
