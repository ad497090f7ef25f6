"""MNIST and CIFAR-10, which torchvision downloads and unpacks if they are missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wordrun.common.errors import UserError, first_line
from wordrun.common.files import absolute
from wordrun.config.compose import data_home
from wordrun.data.examples import Splits
from wordrun.data.images import Images, shifted, shifted_or_flipped, splits
from wordrun.data.options import ImagesConfig
from wordrun.dist import torch_private

CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of each channel, for pixels from 0 to 1."""
MNIST = (0.1307,), (0.3081,)


def mnist(data: ImagesConfig) -> Splits:
    """Return MNIST: 60,000 training images of digits, 28x28 pixels, and 10,000 for validation."""
    train, val = (Images(part.data[:, None], part.targets, MNIST) for part in _torchvision("MNIST", data))
    return splits(train, val, (1, 28, 28), 10, f"MNIST in {_folder(data)}", shifted if data.augment else None)


def cifar10(data: ImagesConfig) -> Splits:
    """Return CIFAR-10: 50,000 color images, 32x32 pixels, and 10,000 for validation."""
    train, val = (
        Images(torch.from_numpy(part.data).permute(0, 3, 1, 2), torch.tensor(part.targets), CIFAR10)
        for part in _torchvision("CIFAR10", data)
    )
    augment = shifted_or_flipped if data.augment else None
    return splits(train, val, (3, 32, 32), 10, f"CIFAR-10 in {_folder(data)}", augment)


def _folder(data: ImagesConfig) -> Path:
    return absolute(data.path or f"{data_home()}/{data.name}")


def _torchvision(name: str, data: ImagesConfig) -> Iterator[Any]:
    """Yield the training and test set of torchvision's dataset ``name``, downloading it if it is missing.

    Raises:
        UserError: it is not there and cannot be downloaded.
    """
    cls = getattr(torch_private.torchvision("datasets", f"data={data.name}"), name)
    for train in (True, False):
        try:
            yield cls(str(_folder(data)), train=train, download=True)
        except Exception as error:  # any error from the network or the disk
            # MNIST's message has a heading and a line for each mirror; those of others have one line.
            reason = first_line(str(error).strip().rpartition("\n")[2] or error)
            raise UserError(
                f"data={data.name} is not in {_folder(data)} and could not be downloaded ({reason}). On a "
                f"machine with network access (a login node), start any run with it; or use data=digits, which needs "
                "no download."
            ) from None
