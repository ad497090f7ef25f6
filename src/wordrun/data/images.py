"""Image classification data: for each dataset, a function that takes its options and returns its two splits."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.files import absolute
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.data.contents import SPLITS, below, by_name, few, is_litter
from wordrun.data.examples import Augment, Splits
from wordrun.data.options import FakeImagesConfig, ImageFolderConfig, ImagesConfig

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel, for pixels from 0 to 1."""
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
    train_root, val_root, left_out = _split_folders(root)
    classes, train, more = listed(train_root)
    left_out += more
    if val_root is not None:
        others, val, more = listed(val_root)
        left_out += more
        if others != classes:
            missing, extra = sorted({*classes} - {*others}), sorted({*others} - {*classes})
            raise ConfigError(
                f"{train_root} and {val_root} should have the same folders, but "
                + " and ".join(
                    f"only {where} has {few(names)}"
                    for where, names in ((train_root.name, missing), (val_root.name, extra))
                    if names
                )
            )
    else:
        held_out = round(1 / data.val_fraction)
        train, val = [each for i, each in enumerate(train) if i % held_out], train[::held_out]
    split = f", validation in {val_root.name}" if val_root is not None else ""
    read = f"{len(train):,} images for training and {len(val):,} for validation of {len(classes):,} classes{split}"
    if left_out:
        LOGGER.warning(
            "data=%s: read %s, left out %d: %s", data.name, read, len(left_out), few(left_out), extra=FIRST_RANK
        )
    else:
        LOGGER.info("data=%s: read %s", data.name, read, extra=FIRST_RANK)
    augment = shifted_or_flipped if data.augment else None
    shape = (3, data.size, data.size)
    files = Files(train, data.size), Files(val, data.size)
    return splits(files[0], files[1], shape, len(classes), str(root), augment, data.threads)


def _split_folders(root: Path) -> tuple[Path, Path | None, list[str]]:
    """Return the folder of the training classes, that of the validation classes (None: none), and what is left out.

    The folders in ``root`` are splits by their names (train, val, test and the like) if they contain folders.
    """
    splits, flat, others = dict[str, Path](), list[str](), list[str]()
    for path in sorted(root.iterdir()):
        split = SPLITS.get(path.name.lower()) if path.is_dir() else None
        if split and not any(_is_image(each) for each in path.iterdir()):
            if split in splits:
                raise ConfigError(f"{splits[split]} and {path} are both for {split}: leave one out")
            splits[split] = path
        elif split:
            flat.append(path.name)
        elif not is_litter(path.name):
            others.append(path.name)
    if not splits:
        return root, None, []
    if flat:
        raise ConfigError(
            f"data.path={root}: {few(flat)} should have a folder of images for each class, as "
            f"{few([path.name for path in splits.values()])} has, but has images",
            page="tasks.md#images",
        )
    if "train" not in splits:
        raise ConfigError(
            f"data.path={root} has {' and '.join(path.name for path in splits.values())}, but no folder train",
            page="tasks.md#images",
        )
    val = splits.get("val") or splits.get("test")
    if "val" in splits and "test" in splits:
        others.append(splits["test"].name)
    return splits["train"], val, others


def _is_image(path: Path) -> bool:
    return by_name(path.name).type == "image" and not is_litter(path.name)


def listed(root: Path) -> tuple[list[str], list[tuple[str, int]], list[str]]:
    """Return the classes in the folder ``root``, its images with the numbers of their classes, and what is left out.

    Raises:
        ConfigError: it has no folders, or one without images, or one that contains only folders.
    """
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not is_litter(path.name)]
    left_out = [path.name for path in sorted(root.iterdir()) if not path.is_dir() and not is_litter(path.name)]
    found: list[tuple[str, int]] = []
    problems = [] if folders else ["it has no folders"]
    for number, folder in enumerate(folders):
        paths = sorted(below(str(folder)))
        images = [path for path in paths if _is_image(path)]
        inside = [path for path in folder.iterdir() if not is_litter(path.name)]
        if inside and all(path.is_dir() for path in inside):
            problems.append(f"{folder.name} contains only folders ({few(sorted(path.name for path in inside))})")
        elif not images:
            problems.append(f"there are none in {folder.name}")
        left_out += [str(path.relative_to(root)) for path in paths if not _is_image(path)]
        found += [(str(path), number) for path in images]
    if problems:
        raise ConfigError(
            f"data.path={root} should have a folder of images for each class, but {', '.join(problems)}. Folders of "
            "splits are train, val (valid, validation) and test",
            page="tasks.md#images",
        )
    return [folder.name for folder in folders], found, left_out


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
            # If the file is a named pipe, do not wait for a writer.
            with open(path, "rb", opener=_unblocked) as opened, image.open(opened) as file:
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


def _unblocked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def optional(module: str, user: str) -> Any:
    """Import an optional dependency that ``user`` needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{user} needs more packages ({error}): pip install 'wordrun[vision]'") from None
