"""The weights in a checkpoint of DeepSpeed's engine."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from wordrun.errors import UserError
from wordrun.model import Model

TAG = "engine"
"""DeepSpeed's folder in a checkpoint."""


def weights(folder: Path, model: Model) -> Mapping[str, Tensor]:
    """Return the fp32 weights in a checkpoint of ``train.backend=deepspeed``, gathered from all ranks' shards.

    Args:
        folder: the checkpoint.
        model: the meta model of what was trained.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    try:
        convert = importlib.import_module("deepspeed.utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise UserError(
            f"{folder} was written by DeepSpeed, which is needed to read it ({error}): pip install 'wordrun[deepspeed]'"
        ) from None
    state = convert(str(folder), tag=TAG)
    return {name: state[name] for name, _ in model.weights()}
