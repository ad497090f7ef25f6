from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from wordrun.common.errors import ConfigError
from wordrun.config import DataConfig, ModelConfig
from wordrun.data.examples import Splits


@dataclass
class TableConfig(DataConfig):
    """A CSV file of numbers with a header, one column of which is predicted."""

    path: str | None = None
    """The file."""
    target: str = "y"
    """Name of the column to predict."""


def table(options):
    try:
        rows = np.genfromtxt(str(options.path), delimiter=",", names=True, deletechars="", ndmin=1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path={options.path}: {error}") from None
    if options.target not in (names := rows.dtype.names or ()):
        raise ConfigError(f"data.target={options.target} is no column of {options.path} ({', '.join(names)})")
    inputs = np.stack([rows[name] for name in names if name != options.target], 1)
    whole = np.isfinite(inputs).all(1) & np.isfinite(rows[options.target])  # without empty and other cells
    x, y = inputs[whole], rows[options.target][whole]
    held_out = np.arange(len(x)) % 10 == 0
    mean, std = x[~held_out].mean(0), x[~held_out].std(0) + 1e-8  # not of what is held out
    x = (x - mean) / std
    splits = (
        TensorDataset(torch.from_numpy(x[part]).float(), torch.from_numpy(y[part]).float())
        for part in (~held_out, held_out)
    )
    facts = {"inputs": x.shape[1], "mean": float(y[~held_out].mean()), "std": float(y[~held_out].std() + 1e-8)}
    return Splits(*splits, facts, f"{whole.sum()} of {len(rows)} rows of {options.path}", draws=False)


@dataclass
class RegressionConfig(ModelConfig):
    """A number from numbers."""

    name: str = "regression"
    hidden: int = 64
    """Hidden units."""


class Regression(nn.Module):
    def __init__(self, cfg, inputs, mean, std):
        super().__init__()
        self.mean, self.std = mean, std
        self.up, self.down = nn.Linear(inputs, cfg.hidden), nn.Linear(cfg.hidden, 1)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))[:, 0] * self.std + self.mean

    def losses(self, batch):
        return ((self(batch.inputs) - batch.targets) / self.std).square()
