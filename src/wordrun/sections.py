"""The base classes of config sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from wordrun.validation import not_negative, positive

EXAMPLES = "wordrun.train.examples:ExamplesTask"
"""The task of data that consist of examples with an index: images with their classes, or any map-style dataset."""
TEXT = "wordrun.train.language:LanguageTask"
"""The task of text: language modeling."""


class Section:
    """A section of the config."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone, a message each."""
        return []

    def conflicts(self, cfg: Any) -> Iterable[str]:
        """Return where the other options of ``cfg``, the complete Config, contradict these, a message each."""
        return []


@dataclass
class ModelConfig(Section):
    """Options of every model."""

    task: ClassVar[str] = EXAMPLES
    """The task that the model is for; that of the data must be the same."""
    divides: ClassVar[tuple[str, ...]] = ()
    """How the model can be divided besides by examples: cp (its sequences), tp (its matrices), pp (its layers), ep (its
    experts)."""

    name: str = "model"
    """Name of the preset; part of the run directory."""
    batch_size: int = 12
    """Examples (of text: sequences) per rank and micro-step."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return positive("model", self, "batch_size")

    def tensor_parallel_options(self) -> list[str]:
        """Return the options whose values backend.tp must divide."""
        return []

    def sequences_per_step(self) -> int | None:
        """Return the number of examples of an optimizer step that suits the model's size; None: any."""
        return None

    def width_ratio(self) -> float:
        """Return the ratio of the width to that of the model whose learning rate was tuned; 1: no scaling."""
        return 1.0

    def head_ratio(self) -> float:
        """Return the ratio of the size of attention heads to that in the model whose learning rate was tuned."""
        return 1.0

    def rate_factor(self) -> float | None:
        """Return by what the model's size multiplies the learning rates in conf/optimizer; None: it does not."""
        return None


@dataclass
class DataConfig(Section):
    """Options of every dataset."""

    task: ClassVar[str] = EXAMPLES
    """The task, as ``package.module:Class``: how the data become batches, and what is reported."""

    name: str = "data"
    """Name of the dataset; part of the run directory."""
    kind: str = ""
    """Kind of source."""
    prefetch: int = 2
    """Number of steps whose batches a background thread prepares in advance; 0: none."""

    def problems(self) -> Iterable[str]:
        """Return what is wrong with these options alone."""
        return not_negative("data", self, "prefetch")
