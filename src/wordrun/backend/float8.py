"""Linear layers that multiply in float8 (Micikevicius et al. 2022), by torchao.

Weights, gradients and activations keep their dtypes: each product casts its two factors, with one scale for the whole
matrix or for each row. So checkpoints do not change; evaluations during the run compute in float8 as well.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from wordrun.common.errors import ConfigError

MULTIPLE = 16
"""Float8 products need both dimensions of a weight to be multiples of this."""
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""The lowest NVIDIA compute capability for which torch has such products: Ada, or Hopper for one scale per row."""


def require(recipe: str, device: torch.device) -> None:
    """Raise a ConfigError unless ``device`` has the float8 products of ``recipe``, and torchao is installed."""
    needed, have = CAPABILITY[recipe], f"this device is a {device.type}"
    if device.type == "cuda" and torch.version.cuda:
        found = torch.cuda.get_device_capability(device)
        if found >= needed:
            torchao("float8")
            return
        have = f"this {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
    raise ConfigError(
        f"train.float8={recipe} needs an NVIDIA GPU of compute capability {needed[0]}.{needed[1]} or higher, but "
        f"{have}: use train.float8=none",
        page="speed.md#float8",
    )


def convert(block: nn.Module, recipe: str) -> None:
    """Replace the linear layers of ``block`` that ``suits`` accepts; their parameters stay the same objects."""
    found = [name for name, module in block.named_modules() if suits(module)]
    if not found:
        sizes = {f"{m.in_features} x {m.out_features}" for m in block.modules() if isinstance(m, nn.Linear)}
        raise ConfigError(
            f"train.float8={recipe} needs linear layers whose sizes are multiples of {MULTIPLE}, but the blocks of "
            f"this model have {', '.join(sorted(sizes)) or 'no linear layer'}: use train.float8=none, or another "
            "model.n_embd"
        )
    torchao("float8").convert_to_float8_training(
        block, config=settings(recipe), module_filter_fn=lambda module, name: name in found
    )


def suits(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer that can compute in float8."""
    return type(module) is nn.Linear and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0


def settings(recipe: str) -> Any:
    """Return torchao's options for ``recipe``."""
    return torchao("float8").Float8LinearConfig.from_recipe_name(recipe)


def torchao(module: str) -> Any:
    """Import a module of torchao.

    Raises:
        ConfigError: it cannot be imported, perhaps because it is for another torch.
    """
    try:
        return importlib.import_module(f"torchao.{module}")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"train.float8 needs a torchao compatible with torch {torch.__version__} ({error}): pip install "
            "'wordrun[float8]', or 'torchao<0.14' for torch 2.8"
        ) from None
