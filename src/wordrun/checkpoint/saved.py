"""A checkpoint that one process can read by itself: for export, generation and other runs' first weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun.checkpoint import folder as folders
from wordrun.checkpoint import pieces
from wordrun.checkpoint.folder import DamagedError, Folder
from wordrun.config import Config, from_plain
from wordrun.errors import UserError
from wordrun.log import LOGGER
from wordrun.model import outline

MODEL = "model."
"""What the names of weights begin with in a checkpoint."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, and what it says of the run that wrote it."""

    folder: Path
    step: int
    config: Config
    tokenizer_json: str
    vocab_size: int
    """Of the tokenizer; the model's may be larger."""
    manifest: dict[str, Any]

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights by the names of ``Transformer.state_dict``, each read when it is asked for."""
        if self.manifest["backend"]["kind"] == "deepspeed":
            from wordrun.checkpoint.deepspeed import weights

            return weights(self.folder, outline(self.config.model, self.vocab_size))
        return Weights(self.folder)

    def read_weights(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return all weights in fp32 on ``device``; a head that is the embedding is left out."""
        return {name: tensor.to(device) for name, tensor in self.weights().items()}


class Weights(Mapping[str, Tensor]):
    """The weights in a checkpoint folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = pieces.names_in(folder)
        self._places = {name.removeprefix(MODEL): facts[name] for name in facts if name.startswith(MODEL)}

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight, whole, on the CPU."""
        tensor = pieces.place_for(self._places[name])
        pieces.read(self.folder, {MODEL + name: tensor}, alone=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def find(run_dir: Path, which: str = "latest", *, check: bool = True) -> Saved:
    """Return the checkpoint of a run that ``which`` names; a damaged newest one is passed over with a warning.

    Args:
        run_dir: a run directory, or a checkpoint in one.
        which: latest, best, or a number of steps.
        check: read all files, to compare their checksums.

    Raises:
        UserError: there is no such checkpoint (the message lists those there are), or none is whole.
    """
    candidates = folders.choose(Path(run_dir), which)
    for each in reversed(candidates):
        try:
            return _open(each, check)
        except DamagedError as error:
            if each is candidates[0]:
                raise
            LOGGER.warning("%s; taking the one before it", error)
    raise AssertionError("choose returns at least one")


def _open(folder: Folder, check: bool) -> Saved:
    manifest = folder.check_sizes()
    problem = folder.check_content(manifest["files"], manifest) if check else ""
    if problem:
        raise DamagedError(problem)
    try:
        tokenizer = (folder.path / folders.TOKENIZER).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder.path / folders.TOKENIZER}: {error.strerror}") from None
    return Saved(folder.path, folder.step, from_plain(manifest["config"]), tokenizer, manifest["vocab_size"], manifest)
