"""Everything that uses or replaces private names of DeepSpeed, and what undoes it at the end of a run.

Tested with DeepSpeed 0.19.8, torch 2.8 and 2.13.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import logging
import os
import pickle
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from wordrun.common.errors import UserError, unpickling_problem

DEEPSPEED = {
    "deepspeed.comm.torch": ("build_shm_op",),
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.utils.groups": ("_release_process_group_references",),
}
"""DeepSpeed internals that ``quiet_deepspeed`` and ``restore_after_deepspeed`` replace or call, by module."""
DEEPSPEED_STATE = {
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
"""The classes in DeepSpeed's checkpoints, by module; they only hold data."""
DATA_ONLY = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""The variables that make torch.load read no code, whatever its arguments."""


def quiet_deepspeed() -> None:
    """Stop DeepSpeed from compiling an optional op at startup and from warning at each step.

    If a version lacks these names and finds a compiler, it compiles a shared-memory all-reduce, which takes minutes
    once.
    """
    _replace("deepspeed.comm.torch", "build_shm_op", lambda: None)
    # torch 2.13 renamed two collectives; DeepSpeed uses the old names, which still work.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def is_op_build_error(error: Exception) -> bool:
    """Return whether DeepSpeed failed to compile an op; False if its modules have moved: users see the traceback."""
    return any("op_builder" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def restore_after_deepspeed(undo: contextlib.ExitStack, rank: int) -> None:
    """Quieten DeepSpeed's log, and make ``undo`` revert the engine's global changes.

    The changes are to torch's ``F.linear`` and DeepSpeed's process group handles. If a version lacks the handles, a
    second run in the same process may fail; the first does not need them.
    """
    logger = logging.getLogger("DeepSpeed")
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.WARNING if rank == 0 else logging.ERROR)

    def is_news(record: logging.LogRecord) -> bool:
        return "untested optimizer" not in record.getMessage()  # our tests compare them with one process

    logger.addFilter(is_news)
    undo.callback(logger.removeFilter, is_news)
    undo.callback(setattr, F, "linear", F.linear)
    undo.callback(_replace, "deepspeed.comm.comm", "cdb", None)
    groups = importlib.import_module("deepspeed.utils.groups")
    undo.callback(getattr(groups, "_release_process_group_references", lambda: None))


@contextlib.contextmanager
def deepspeed_reads_data_only(folder: Path) -> Iterator[None]:
    """Let torch.load read nothing but tensors, plain values and DeepSpeed's own state, whatever its arguments.

    DeepSpeed asks for everything that a pickle may contain, including code; torch's own variables overrule that. If a
    version keeps further classes in its checkpoints, reading one fails with an error that names them; add them to
    ``DEEPSPEED_STATE``.

    Raises:
        UserError: something failed, and one of DeepSpeed's files in ``folder`` cannot be read.
    """
    known: list[Any] = [(_enum_member, "builtins.getattr")]
    known += [getattr(importlib.import_module(module), n) for module, names in DEEPSPEED_STATE.items() for n in names]
    with torch.serialization.safe_globals(known), variables(DATA_ONLY):
        try:
            yield
        except Exception:
            for file in sorted(folder.glob("*.pt")):
                try:
                    torch.load(file, map_location="cpu", mmap=True)
                except Exception as error:  # pickle, zip and the file system have their own
                    raise UserError(f"{file} cannot be read: {unpickling_problem(error)}") from None
            raise


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within a ``with`` block."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _enum_member(kind: Any, name: str) -> enum.Enum:
    """Take the place of ``getattr``, with which pickles of Python 3.11.0 to 3.11.3 refer to a member of an enum."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"GLOBAL getattr of {kind!r}")
    member: enum.Enum = kind[name]
    return member


def _replace(module: str, name: str, value: Any) -> None:
    found = importlib.import_module(module)
    if hasattr(found, name):
        setattr(found, name, value)
