"""The wrappers of ``compat`` for DeepSpeed.

Tried with DeepSpeed 0.19.8, with torch 2.8 and 2.13.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import logging
import pickle
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from wordrun.errors import UserError, unpickling_problem

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


def quiet_deepspeed() -> None:
    """Stop DeepSpeed from compiling an optional op at startup and from warning at each step.

    If the names are missing, it compiles a shared-memory all-reduce if it finds a compiler, which takes minutes once.
    """
    _replace("deepspeed.comm.torch", "build_shm_op", lambda: None)
    # torch 2.13 renamed two collectives; DeepSpeed uses the old names, which still work.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def is_op_build_error(error: Exception) -> bool:
    """Return whether DeepSpeed failed to compile an op; False if its modules have moved: users see the traceback."""
    return any("op_builder" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def restore_after_deepspeed(undo: contextlib.ExitStack, rank: int) -> None:
    """Quieten DeepSpeed's log, and make ``undo`` revert the engine's global changes.

    These are torch's ``F.linear`` and DeepSpeed's process group handles. If a version lacks the handles, a second run
    in the same process may fail; the first does not need them.
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
def deepspeed_reads_data_only() -> Iterator[None]:
    """Let torch.load read nothing but tensors, plain values and DeepSpeed's own state, whatever its arguments.

    DeepSpeed asks for everything that a pickle may contain, including code. If a version keeps further classes in its
    checkpoints, reading one fails with an error that names them; add them to ``DEEPSPEED_STATE``.
    """
    real: Any = torch.load
    known: list[Any] = [(_enum_member, "builtins.getattr")]
    known += [getattr(importlib.import_module(module), n) for module, names in DEEPSPEED_STATE.items() for n in names]

    def load(file: Any, *args: Any, **options: Any) -> Any:
        try:
            return real(file, *args, **{**options, "weights_only": True})
        except Exception as error:  # pickle, zip and the file system have their own
            raise UserError(f"{file} cannot be read: {unpickling_problem(error)}") from None

    _replace("torch", "load", load)
    try:
        with torch.serialization.safe_globals(known):
            yield
    finally:
        _replace("torch", "load", real)


def _enum_member(kind: Any, name: str) -> enum.Enum:
    """Stand for ``getattr``, with which pickles of Python 3.11.0 to 3.11.3 refer to a member of an enum."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"GLOBAL getattr of {kind!r}")
    member: enum.Enum = kind[name]
    return member


def _replace(module: str, name: str, value: Any) -> None:
    found = importlib.import_module(module)
    if hasattr(found, name):
        setattr(found, name, value)
