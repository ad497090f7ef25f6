"""The states of this process's random number generators (RNG), saved and restored together."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the RNG states of Python, NumPy and torch, including the current device's."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    for name in ("cuda", "xpu"):
        device: Any = getattr(torch, name)
        if device.is_available() and device.is_initialized():
            state[name] = device.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set the RNG states to what ``capture`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for name in ("cuda", "xpu"):
        if name in state:
            getattr(torch, name).set_rng_state(state[name])


@contextlib.contextmanager
def swapped(state: dict[str, Any]) -> Iterator[None]:
    """Run a ``with`` block on the RNG states in ``state``, update them at its end, and restore the caller's.

    With an empty ``state``, the block starts from the caller's states.
    """
    outer = capture()
    if state:
        restore(state)
    try:
        yield
    finally:
        state.update(capture())
        restore(outer)


def to_tensor(state: dict[str, Any]) -> torch.Tensor:
    """Serialise what ``capture`` returned to a tensor, (N,) uint8."""
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    plain = {
        **state,
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def from_tensor(data: torch.Tensor) -> dict[str, Any]:
    """Return the RNG states that ``to_tensor`` serialised."""
    plain: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    version, words, gauss = plain["python"]
    kind, keys, *rest = plain["numpy"]
    plain["python"] = (version, tuple(words.tolist()), gauss)
    plain["numpy"] = (kind, keys.numpy().astype(np.uint32), *rest)
    return plain
