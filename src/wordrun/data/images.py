"""Image classification data: for each dataset, a function that takes its options and returns its two splits."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.files import absolute
from wordrun.data.examples import Augment, Splits
from wordrun.data.options import FakeImagesConfig, ImageFolderConfig, ImagesConfig

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel, for pixels from 0 to 1."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".tif", ".tiff", ".webp")
"""Endings of the files of images in a folder."""
HELD_OUT = 5
"""One in this many of scikit-learn's digits is for validation."""


@dataclass(frozen=True)
class Images:
    """Images in memory."""

    pixels: Tensor
    """(N, channels, height, width), uint8."""
    labels: Tensor
    """(N,) int64."""
    scale: tuple[Sequence[float], Sequence[float]]
    """Mean and standard deviation of each channel, for pixels divided by ``white``."""
    white: int = 255
    """The largest possible pixel value."""

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (channels, height, width) in fp32, and its class."""
        return standardized(self.pixels[index].float() / self.white, self.scale), self.labels[index]


def standardized(image: Tensor, scale: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    """Return ``image`` (channels, height, width), standardized with the means and standard deviations in ``scale``."""
    mean, std = (torch.tensor(each)[:, None, None] for each in scale)
    return (image - mean) / std


def shifted(image: Tensor, rng: np.random.Generator, *, flip: bool = False) -> Tensor:
    """Return ``image`` shifted by up to an eighth of its size; with ``flip``, also mirrored half of the time."""
    height, width = image.shape[-2:]
    border = max(1, min(height, width) // 8)
    y, x = rng.integers(0, 2 * border + 1, 2)
    moved = torch.nn.functional.pad(image, [border] * 4)[..., y : y + height, x : x + width]
    return moved.flip(-1) if flip and rng.random() < 0.5 else moved


def shifted_or_flipped(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Return ``image`` shifted as by ``shifted``, and flipped half of the time."""
    return shifted(image, rng, flip=True)


def splits(
    train: Any, val: Any, shape: Sequence[int], classes: int, origin: str, augment: Augment | None, threads: int = 1
) -> Splits:
    """Return data for a classifier of images of the ``shape`` (channels, height, width)."""
    return Splits(train, val, {"shape": list(shape), "classes": classes}, origin, augment, threads, draws=False)


def digits(data: ImagesConfig) -> Splits:
    """Return scikit-learn's 1,797 images of handwritten digits, 8x8 pixels; every fifth is for validation."""
    found = optional("sklearn.datasets", "data=digits").load_digits()
    pixels, labels = torch.from_numpy(found.images).to(torch.uint8)[:, None], torch.from_numpy(found.target).long()
    held_out = torch.arange(len(labels)) % HELD_OUT == 0
    train, val = (Images(pixels[part], labels[part], ((0.3,), (0.38,)), 16) for part in (~held_out, held_out))
    return splits(train, val, (1, 8, 8), 10, "scikit-learn's digits", shifted if data.augment else None)


def fake_images(data: FakeImagesConfig) -> Splits:
    """Return random images; each class has its own mean colors."""
    shape = (data.channels, data.size, data.size)
    train, val = FakeImages(data, 0, data.examples), FakeImages(data, 1, -(-data.examples // 10))
    return splits(train, val, shape, data.classes, "random images", shifted_or_flipped if data.augment else None)


@dataclass(frozen=True)
class FakeImages:
    """Images that are computed when they are read."""

    data: FakeImagesConfig
    split: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image of noise around the class's mean colors, and the class."""
        data, label = self.data, index % self.data.classes
        rng = np.random.Generator(np.random.Philox(key=np.array([self.split, index], dtype=np.uint64)))
        noise = torch.from_numpy(rng.standard_normal((data.channels, data.size, data.size), dtype=np.float32))
        colors = np.random.default_rng(label).standard_normal((data.channels, 1, 1), dtype=np.float32)
        return noise + torch.from_numpy(colors), label


def imagefolder(data: ImageFolderConfig) -> Splits:
    """Return the images in data.path; the names of the folders in it, in order, are the classes."""
    root = absolute(str(data.path))
    if not root.is_dir():
        raise ConfigError(f"data.path={data.path} is not a folder: name one with a folder of images for each class")
    parts = [root / name for name in ("train", "val")]
    if all(part.is_dir() for part in parts):
        (classes, train), (others, val) = map(listed, parts)
        if others != classes:
            raise ConfigError(
                f"{parts[0]} has the classes {', '.join(classes)}, but {parts[1]} has {', '.join(others)}: both should "
                "have the same folders"
            )
    else:
        classes, found = listed(root)
        held_out = round(1 / data.val_fraction)
        train = [each for i, each in enumerate(found) if i % held_out]
        val = found[::held_out]
    augment = shifted_or_flipped if data.augment else None
    shape = (3, data.size, data.size)
    files = Files(train, data.size), Files(val, data.size)
    return splits(files[0], files[1], shape, len(classes), str(root), augment, data.threads)


def listed(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the classes in the folder ``root``, and the path and class number of each image.

    Raises:
        ConfigError: it has no folders, or one without images.
    """
    classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and folder.name[:1] != ".")
    files = {name: sorted(p for p in (root / name).rglob("*") if p.suffix.lower() in SUFFIXES) for name in classes}
    if not classes or not all(files.values()):
        empty = ", ".join(name for name, found in files.items() if not found)
        problem = f"there are none in {empty}" if empty else "it has no folders"
        raise ConfigError(
            f"data.path={root} should have a folder of images for each class, but {problem}", page="tasks.md#images"
        )
    return classes, [(str(path), number) for number, name in enumerate(classes) for path in files[name]]


@dataclass(frozen=True)
class Files:
    """Images in files, decoded when they are read."""

    files: list[tuple[str, int]]
    """Path and class of each."""
    size: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (3, size, size), scaled and center-cropped, and its class.

        Raises:
            UserError: the file cannot be decoded.
        """
        path, label = self.files[index]
        image = optional("PIL.Image", "data=imagefolder")
        try:
            with image.open(path) as file:
                factor = self.size / min(file.size)
                width, height = (max(self.size, round(length * factor)) for length in file.size)
                left, top = (width - self.size) // 2, (height - self.size) // 2
                scaled = file.convert("RGB").resize((width, height), image.Resampling.BILINEAR)
                pixels = np.array(scaled.crop((left, top, left + self.size, top + self.size)))
        except Exception as error:  # a damaged file can raise anything
            raise UserError(
                f"data.path: {path} is not an image that can be decoded ({first_line(error)}): repair or replace it"
            ) from None
        return standardized(torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, IMAGENET), label


def optional(module: str, user: str) -> Any:
    """Import an optional dependency that ``user`` needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{user} needs more packages ({error}): pip install 'wordrun[vision]'") from None
