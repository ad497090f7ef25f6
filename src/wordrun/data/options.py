"""Options of data."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from wordrun.common.section import EXAMPLES, TEXT, Section
from wordrun.common.validation import not_negative, one_of, part_of_path, positive


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
        return [*part_of_path("data.name", self.name), *not_negative("data", self, "prefetch")]


@dataclass
class TextConfig(DataConfig):
    """Where the text comes from, and how it is divided into sequences."""

    task: ClassVar[str] = TEXT

    name: str = "shakespeare"
    """Name of the dataset; part of the run directory."""
    kind: str = "file"
    """Kind of source: file (path), download (path, downloaded from url if missing), sample (built-in synthetic text),
    hf (dataset), chat (path: .jsonl files of conversations; the loss is on the assistant's turns alone), pairs (path:
    of prompts and answers; on the answers alone), shards (path: a folder of tokens prepared elsewhere) or mix (several
    datasets)."""
    path: str | None = None
    """A file, a folder or a glob of text (.txt, .md, .rst, .tex) or rows (.jsonl, .json, .csv, .tsv, .parquet), also
    compressed (.gz, .zst, .bz2, .xz); for shards, a folder."""
    format: str | None = None
    """What the files are, whatever their suffixes: text, jsonl, json, csv or parquet; null: by suffix and content."""
    url: str | None = None
    """URL from which to download the file if path does not exist."""
    sha256: str | None = None
    """Expected SHA-256 of the file; a file with a different hash is rejected."""
    offline: str = "error"
    """What to do if the download fails: error, or sample (train on the built-in text and show a warning)."""
    strict: bool = False
    """Stop if a file cannot be used or a row has no text; false: leave these out with a warning."""
    text_key: str = "text"
    """Field or column that contains the text of a row."""
    prompt_key: str = "prompt"
    """Field of a prompt (pairs)."""
    answer_key: str = "answer"
    """Field of an answer (pairs)."""
    template: str = "{prompt}{answer}"
    """Text of a pair; the loss is on {answer} and what follows it. {NAME} is a field of the line, {NAME.KEY} one inside
    it, and {{ and }} are braces. wordrun generate formats the turns of a conversation with it. For chat: tokenizer (the
    tokenizer's own chat template), chatml, or a file with a Jinja template."""
    too_long: str = "drop"
    """What to do with a pair or a conversation that is longer than model.block_size: drop it, or truncate it."""
    dataset: str | None = None
    """A Hugging Face dataset: its name, or a local folder."""
    subset: str | None = None
    """Configuration of the Hugging Face dataset, such as sample-10BT."""
    split: str = "train"
    """Split of the Hugging Face dataset, used for both training and validation."""
    revision: str | None = None
    """Revision of the Hugging Face dataset: a tag, branch or commit; null: the latest."""
    val_fraction: float = 0.1
    """Fraction used for validation: the end of a single text, or every (1 / val_fraction)-th document of many."""
    prepared: str | None = None
    """Folder of the prepared shards; null: a folder under $WORDRUN_DATA_HOME/prepared whose name contains a hash."""
    shard_mb: int = 64
    """Text per shard in MiB; also the size of the work items prepared in parallel."""
    workers: int | None = None
    """Worker processes per rank for preparation; null: the number of cores per rank."""
    stage: str | None = None
    """Node-local folder (disk or memory) to which the shards are copied before training."""
    mix: dict[str, float] = field(default_factory=dict)
    """Weights of datasets, such as {fineweb: 3, yelp: 1}; a key is the NAME in data=NAME, or a folder of shards."""
    align: bool = False
    """Start each sequence at the first document boundary inside it, if there is one."""
    mask_documents: bool = False
    """Mask attention so that tokens attend only within their own document; for pairs and conversations, also pack
    several into a sequence (false: one)."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from one_of("data.offline", self.offline, ["error", "sample"])
        if self.format is not None:
            yield from one_of("data.format", self.format, ["text", "jsonl", "json", "csv", "parquet"])
        yield from one_of("data.too_long", self.too_long, ["drop", "truncate"])
        if self.kind in ANSWERED:
            yield from self._answered_problems()
        if self.kind == "pairs":
            yield from self._pairs_problems()
        if self.kind in ("file", "download") and not self.path:
            yield f"data={self.name} needs data.path=FILE, a text file"
        if self.kind == "shards" and not self.path:
            yield f"data={self.name} needs data.path=FOLDER, a folder of .bin or .npy files"
        if self.kind == "hf" and not self.dataset:
            yield f"data={self.name} needs data.dataset=NAME of a Hugging Face dataset, or a FOLDER"
        if self.kind == "download" and not (self.url and self.sha256):
            yield "data.kind=download needs data.url and data.sha256"
        if not 0 < self.val_fraction < 1:
            yield f"data.val_fraction={self.val_fraction} should be between 0 and 1"
        yield from positive("data", self, "shard_mb", "workers")
        yield from self._mix_problems()

    def turn(self, prompt: str, field: Callable[[str], str] = lambda name: "") -> tuple[str, str]:
        """Return what precedes the answer to ``prompt`` in the template, and what follows it.

        ``field`` returns the text of another field of the line by its name.
        """
        sides = [""]
        for text, name in self.template_parts():
            sides[-1] += text
            if name == "answer":
                sides.append("")
            elif name:
                sides[-1] += prompt if name == "prompt" else field(name)
        return sides[0], sides[1]

    def template_parts(self) -> list[tuple[str, str]]:
        """Return the template as literal texts, each with the name of the field after it; empty: none.

        Raises:
            ValueError: it has a brace that is not part of a field.
        """
        roles, parts = {self.prompt_key: "prompt", self.answer_key: "answer"}, []
        for text, name, form, conversion in string.Formatter().parse(self.template):
            if name is not None and (form or conversion or not name.strip() or {*name} & {*"[]"}):
                raise ValueError(f"{{{name}...}} is not the name of a field")
            parts.append((text, roles.get(name or "", name or "")))
        return parts

    def other_fields(self) -> list[str]:
        """Return the fields of a line that the template has besides the prompt and the answer."""
        return list(dict.fromkeys(name for _, name in self.template_parts() if name not in ("", "prompt", "answer")))

    def _answered_problems(self) -> Iterable[str]:
        if not self.path:
            rows = "prompts and answers" if self.kind == "pairs" else "conversations"
            yield f"data={self.name} needs data.path=FILE, a .jsonl file of {rows}"
        if self.align:
            yield f"data.align=true has no effect on {self.kind}, which are never split across sequences: omit it"

    def _pairs_problems(self) -> Iterable[str]:
        try:
            names = [name for _, name in self.template_parts()]
        except ValueError as error:
            yield (
                f"data.template={self.template!r}: {error}; write {{NAME}} for a field of the line, {{NAME.KEY}} for "
                "one inside it, and {{ and }} for braces"
            )
        else:
            order = "".join(name[0] for name in names if name in ("prompt", "answer"))
            if order.lstrip("p") != "a" or order == "a":
                yield (
                    f"data.template={self.template!r} should contain {{prompt}} and then {{answer}}, once and "
                    "after it; data.prompt_key and data.answer_key say which fields they are"
                )

    def _mix_problems(self) -> Iterable[str]:
        if self.kind != "mix":
            if self.mix:
                yield f"data.mix is for data=mix, not data={self.name}: omit one of the two"
            return
        if not self.mix:
            yield "data=mix needs data.mix, the weight of each dataset, such as 'data.mix={fineweb: 3, yelp: 1}'"
        least = sum(self.mix.values()) / MIX_PERIOD
        for name, weight in self.mix.items():
            if not 0 < weight < math.inf:
                yield f"data.mix.{name}={weight:g} should be a number above 0"
            elif weight < least < math.inf:
                yield (
                    f"data.mix.{name}={weight:g} is less than 1/{MIX_PERIOD} of the total: omit it, or raise it "
                    f"to {least:g}"
                )


ANSWERED = ("pairs", "chat")
"""Kinds of data of which only answers are predicted."""
MIX_PERIOD = 4096
"""Every run of this many sequences has the shares of data.mix, rounded to whole sequences."""


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
    """A folder of images, with a folder for each class, or with folders train and val (or test) of such folders."""

    name: str = "imagefolder"
    """Name of the dataset; part of the run directory."""
    kind: str = "imagefolder"
    """Kind of source; set by data=NAME."""
    size: int = 224
    """Height and width in pixels: the shorter side is scaled to it, and the longer one is center-cropped."""
    val_fraction: float = 0.1
    """Fraction used for validation if there is no folder val or test: every (1 / val_fraction)-th image."""
    threads: int = 4
    """Threads per rank that decode images."""

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from positive("data", self, "size", "threads")
        if not self.path:
            yield f"data={self.name} needs data.path=FOLDER, with a folder of images for each class"
        if not 0 < self.val_fraction <= 0.5:
            yield f"data.val_fraction={self.val_fraction} should be above 0 and at most 0.5"


@dataclass
class FakeImagesConfig(ImagesConfig):
    """Random images, each class with its own mean colors; for benchmarks and tests."""

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
        return [*super().problems(), *positive("data", self, "size", "channels", "classes", "examples")]
