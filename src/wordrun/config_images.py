"""The options of image data and of the models that classify images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wordrun.sections import DataConfig, ModelConfig
from wordrun.validation import one_of, positive


@dataclass
class ImagesConfig(DataConfig):
    """A dataset of images and their classes: digits (part of scikit-learn), mnist or cifar10 (downloaded)."""

    name: str = "digits"
    """Name of the dataset; part of the run directory."""
    kind: str = "digits"
    """Kind of source; set by data=NAME."""
    path: str | None = None
    """Folder of the dataset; null: one under $WORDRUN_DATA_HOME, to which it is downloaded."""
    augment: bool = False
    """Augment training images: shift them by up to an eighth of their size, and for cifar10 and imagefolder also flip
    half of them."""


@dataclass
class ImageFolderConfig(ImagesConfig):
    """A folder of images, with a folder for each class, or with folders train and val of such folders."""

    name: str = "imagefolder"
    """Name of the dataset; part of the run directory."""
    kind: str = "imagefolder"
    """Kind of source; set by data=NAME."""
    size: int = 224
    """Images are scaled to fit a square of this many pixels, and cropped to it."""
    val_fraction: float = 0.1
    """Fraction used for validation if there is no folder val: every (1 / val_fraction)-th image."""
    threads: int = 4
    """Threads per rank that decode images."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from positive("data", self, "size", "threads")
        if not self.path:
            yield f"data={self.name} needs data.path=FOLDER, with a folder of images for each class"
        if not 0 < self.val_fraction <= 0.5:
            yield f"data.val_fraction={self.val_fraction} should be above 0 and at most 0.5"


@dataclass
class FakeImagesConfig(ImagesConfig):
    """Random images, each class with its own mean colors; for measurements, and for tests of a model."""

    name: str = "fake_images"
    """Name of the dataset; part of the run directory."""
    kind: str = "fake_images"
    """Kind of source; set by data=NAME."""
    size: int = 224
    """Height and width in pixels."""
    channels: int = 3
    """Color channels."""
    classes: int = 10
    """Number of classes."""
    examples: int = 10000
    """Training images; there are a tenth as many for validation."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return [*super().problems(), *positive("data", self, "size", "channels", "classes", "examples")]


@dataclass
class ConvNetConfig(ModelConfig):
    """Two convolutions, pooling, and two linear layers: the network of PyTorch's MNIST example."""

    name: str = "convnet"
    """Name of the preset; part of the run directory."""
    batch_size: int = 64
    """Examples per rank and micro-step."""
    channels: int = 32
    """Channels of the first convolution; the second has twice as many."""
    hidden: int = 128
    """Width of the first linear layer."""
    dropout: float = 0.25
    """Dropout probability after pooling; twice as large before the last layer."""
    norm: str = "none"
    """Normalization after each convolution: none, batch, or sync (over the batches of all ranks)."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        yield from positive("model", self, "channels", "hidden")
        yield from one_of("model.norm", self.norm, ["none", "batch", "sync"])
        if not 0 <= self.dropout < 0.5:
            problem = "should be at least 0 and less than 0.5, because the last layer uses twice this value"
            yield f"model.dropout={self.dropout} {problem}"


@dataclass
class ResNetConfig(ModelConfig):
    """A residual network (He et al. 2016), as built by torchvision."""

    name: str = "resnet18"
    """Name of the preset; part of the run directory."""
    batch_size: int = 32
    """Examples per rank and micro-step."""
    depth: int = 18
    """Number of layers: 18, 34, 50, 101 or 152."""
    norm: str = "batch"
    """Batch normalization over each rank's own batch (batch), or over the batches of all ranks (sync)."""
    stem: str = "auto"
    """First layers: large (a 7x7 convolution with stride 2, and pooling), small (a 3x3 convolution), or auto (small for
    images of fewer than 64 pixels)."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        yield from super().problems()
        if self.depth not in (18, 34, 50, 101, 152):
            yield f"model.depth={self.depth} should be 18, 34, 50, 101 or 152"
        yield from one_of("model.norm", self.norm, ["batch", "sync"])
        yield from one_of("model.stem", self.stem, ["auto", "large", "small"])
