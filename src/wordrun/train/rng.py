"""The states of this process's random number generators (RNG), saved and restored together; and determinism."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from wordrun.common.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable for cuBLAS, which chooses its algorithms deterministically only with certain values."""


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
    """Exchange the RNG states of this process for those in ``state`` during a ``with`` block.

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


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let torch use only deterministic algorithms within a ``with`` block, and fail where it has none.

    Raises:
        ConfigError: CUDA has been used in this process without the setting that cuBLAS needs.
    """
    if WORKSPACE not in os.environ and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"train.deterministic=true needs {WORKSPACE}=:4096:8 in the environment before CUDA is first used in this "
            f"process: set it at the start (os.environ[{WORKSPACE!r}] = ':4096:8' in a notebook)"
        )
    os.environ.setdefault(WORKSPACE, ":4096:8")
    memory: Any = torch.utils.deterministic  # its type lacks the attribute
    filled, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    # Filling new tensors with NaN only finds code that reads them before writing.
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False  # choosing by time could choose differently
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = benchmark


def has_no_deterministic_algorithm(error: Exception) -> bool:
    """Return whether ``error`` says that an operation has no deterministic algorithm."""
    return isinstance(error, RuntimeError) and "use_deterministic_algorithms" in str(error)


def to_tensor(state: dict[str, Any]) -> torch.Tensor:
    """Serialize what ``capture`` returned to a tensor, (N,) uint8."""
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
    """Return the RNG states that ``to_tensor`` serialized."""
    plain: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    version, words, gauss = plain["python"]
    kind, keys, *rest = plain["numpy"]
    plain["python"] = (version, tuple(words.tolist()), gauss)
    plain["numpy"] = (kind, keys.numpy().astype(np.uint32), *rest)
    return plain
