"""Loads a checkpoint in a single process, for export, generation and the initial weights of other runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wordrun.checkpoint import folder as folders, index, shards
from wordrun.checkpoint.folder import DamagedError, Folder
from wordrun.checkpoint.index import StoredTensor
from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.log import LOGGER
from wordrun.common.run_dir import MANIFEST
from wordrun.config.registry import Part, parts
from wordrun.config.schema import Config, from_plain
from wordrun.model import huggingface_files, lora, mup, pretrained
from wordrun.model.base import LazyWeights, Loaded, Model
from wordrun.model.construction import meta_model, new_model
from wordrun.model.options import TransformerConfig
from wordrun.model.transformer import Transformer

MODEL = "model."
"""Prefix of the names of weights in a checkpoint."""
ARGUMENTS = ("vocab_size", "model_arguments")
"""Entries of a manifest that the model needs besides the config: the first for text, the second for other data."""


class InnerLoadError(UserError):
    """The constructor of a model could not load the model of another run."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, with the config and tokenizer of its run."""

    folder: Path
    step: int
    config: Config
    """The config, with the model's options as without LoRA: ``weights`` have the adapters merged in."""
    tokenizer_json: str
    """Empty if the data are not text."""
    vocab_size: int
    """The tokenizer's vocabulary size; the model's may be larger. 0 if the data are not text."""
    manifest: dict[str, Any]
    lora: TransformerConfig | None = None
    """With LoRA, the options of the model with its adapters."""

    @property
    def tokenizer_file(self) -> Path:
        """The file of ``tokenizer_json``."""
        return self.folder / folders.TOKENIZER

    def weights(self, which: str = "model") -> Mapping[str, Tensor]:
        """Return the weights by the names of the model's ``state_dict``, each read when it is accessed.

        Weights written by DeepSpeed's engine are gathered from all ranks' shards at once. With LoRA, its adapters are
        in the weights.

        Args:
            which: model, or the name of a hook that has saved other values of some or all weights, such as ema.

        Raises:
            UserError: the engine wrote them, and DeepSpeed is not installed; LoRA's base model is missing or changed.
            ConfigError: the checkpoint has no values by the hook ``which``.
        """
        if (engine := self._format) and which == "model":
            read: Mapping[str, Tensor] = engine.load().read_weights(
                self.folder, [name for name, _ in self.meta_model().weights()]
            )
            return read
        stored = self.stored(which)
        return lora.merged(self._base(), stored, self.lora) if self.lora else stored

    def stored(self, which: str = "model") -> Mapping[str, Tensor]:
        """Return the weights in the checkpoint's own files, as ``weights``; with LoRA, the adapters alone."""
        stored = {} if self._format else index.load(self.folder)
        names = {name.removeprefix(MODEL): name for name in stored if name.startswith(MODEL)}
        if which != "model":
            prefix = f"hooks.{which}."
            own = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
            if not own:
                there = dict.fromkeys(name.split(".")[1] for name in stored if name.startswith("hooks."))
                raise ConfigError(
                    f"weights={which}: {self.folder} has only {', '.join(['model', *there])} (runs with hooks=[ema] "
                    "also save averaged weights)"
                )
            for name in own:
                if name not in names or stored[own[name]].shape != stored[names[name]].shape:
                    raise DamagedError(f"{self.folder} is damaged: {own[name]} does not belong to the model")
            names |= own
        return LazyWeights({name: partial(_read, self.folder, full, stored) for name, full in names.items()})

    def _base(self) -> Mapping[str, Tensor]:
        """Return the weights that LoRA adds to."""
        base, model = self.manifest["base"], meta_model(self.config.transformer, self.vocab_size)
        source, there = base["source"], base["source"].removeprefix("hf:")
        remedy = f"{self.folder} holds only LoRA's adapters of {source}: put the original model back there"
        try:
            if source == there:
                found = find(Path(there))
                weights = mup.suited(found.weights(), found.config.model, self.config.model)
            else:
                weights = pretrained.open_weights(
                    huggingface_files.fetch(there), self.config.transformer, self.vocab_size
                )
            if lora.digest_like(base["digest"], weights, model) == base["digest"]:
                return weights
        except UserError as error:
            raise UserError(f"{remedy} ({error})") from None
        raise UserError(f"{remedy} (its weights have changed)")

    def transformer(self) -> Transformer:
        """Return ``meta_model`` of a run on text.

        Raises:
            UserError: the run was on other data.
        """
        self.require_text()
        model: Transformer = self.meta_model()  # type: ignore[assignment]
        return model

    def require_text(self) -> None:
        """Raise a UserError if the run was on other data than text."""
        if "model_arguments" in self.manifest:
            raise UserError(
                f"{self.folder} was trained on data={self.config.data.name}, which is not text: it cannot generate "
                "text, and can be exported only with form=checkpoint"
            )

    def meta_model(self) -> Model:
        """Return the model on the meta device, after comparing it with the weights.

        Raises:
            DamagedError: the config and the weights are not of the same model.
        """
        stored = {} if self._format or self.lora else index.load(self.folder)
        try:
            layers = getattr(self.config.model, "n_layer", 0)
            if stored and layers > len(stored):  # building them could take forever
                raise ValueError(f"model.n_layer={layers} with {len(stored)} tensors")
            arguments = self.manifest.get("model_arguments", {"vocab_size": self.vocab_size})
            model: Model = new_model(self.config.model, **arguments)
            for name, weight in model.weights() if stored else ():
                if MODEL + name not in stored or stored[MODEL + name].shape != weight.shape:
                    raise ValueError(f"{name} is missing, or does not have the shape {list(weight.shape)}")
        except InnerLoadError:
            raise
        except Exception as error:  # the config may contain anything
            where = f"{self.folder} is damaged: {MANIFEST}"
            raise DamagedError(f"{where}: its config does not match the weights: {first_line(error)}") from None
        return model

    def load_model(self, device: torch.device, dtype: torch.dtype, which: str = "model") -> Model:
        """Return the model in evaluation mode, with its ``weights`` of this name in ``dtype`` on ``device``.

        On the meta device it has no values: what contains it reads them from ``Model.loaded_from``.

        Raises:
            UserError, ConfigError: as ``weights``.
        """
        model, kind = self.meta_model(), {True: dtype, False: None}
        weights = self.weights(which)
        model.note_source(Loaded(f"step {self.step}, CRC-32 {folders.checksum(self.manifest)}", weights))
        if device.type == "meta":
            return model.eval()
        every = (*model.loaded_weights().items(), *weights.items())
        state = {name: value.to(device, kind[value.is_floating_point()]) for name, value in every}
        model.load_state_dict(state, assign=True, strict=False)  # checkpoints have one name for shared weights
        model.fill_buffers(device)
        model.tie_all()
        return model.eval()

    @property
    def _format(self) -> Part | None:
        """The backend that wrote the weights in its own format; None: they are in wordrun's."""
        return parts("backend").get(self.manifest["backend"]["kind"])


def _read(folder: Path, name: str, stored: Mapping[str, StoredTensor]) -> Tensor:
    """Return one unsharded tensor on the CPU."""
    tensor = stored[name].empty()
    shards.read(folder, {name: tensor}, stored)
    return tensor


def find(run_dir: Path, which: str = "latest", *, check: bool = True) -> Saved:
    """Return the checkpoint of a run that ``which`` names; a damaged newest one is skipped with a warning.

    Args:
        run_dir: a run directory, or a checkpoint in one.
        which: latest, best, or a number of steps.
        check: read all files to verify their checksums.

    Raises:
        UserError: no checkpoint matches (the message lists the available ones), or all are damaged.
    """
    candidates = folders.choose(Path(run_dir), which)
    while True:
        try:
            return _open(candidates.pop(), check)
        except DamagedError as error:
            if not candidates:
                raise
            LOGGER.warning("%s; trying the previous one", error)


def _open(folder: Folder, check: bool) -> Saved:
    manifest = folder.check(content=check)
    is_text = "model_arguments" not in manifest
    folder.require(manifest, {"vocab_size": int} if is_text else {"model_arguments": dict})
    name = folders.TOKENIZER
    try:
        tokenizer = (folder.path / name).read_text(encoding="utf-8") if is_text else ""
        name = MANIFEST
        config = from_plain(manifest["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder.path} is damaged: {name}: {first_line(error)}") from None
    except UserError as error:
        raise UserError(f"{folder.path}: {error}") from None
    model = config.transformer if config.lora_rank else None
    if model is not None:
        folder.require(manifest, {"base": dict})
        config = replace(config, model=lora.without(model))
    return Saved(folder.path, folder.step, config, tokenizer, manifest.get("vocab_size", 0), manifest, model)
