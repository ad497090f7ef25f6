"""``wordrun export run=DIR``: exports a checkpoint as a folder for transformers or as weights only."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wordrun.common import sigint
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.section import Section
from wordrun.common.validation import above_zero, one_of
from wordrun.config.arguments import run
from wordrun.config.registry import check_has_huggingface_format
from wordrun.config.schema import to_plain
from wordrun.data.options import ANSWERED
from wordrun.model.options import TransformerConfig
from wordrun.train.options import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from wordrun.checkpoint.load import Saved

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)
"""The files of a tokenizer in a model's folder."""
USAGE = """\
Export a checkpoint to Hugging Face format: model.safetensors, config.json and the tokenizer.

  wordrun export run=outputs/latest
  wordrun export run=outputs/latest checkpoint=best out=my-model dtype=bf16
  wordrun export run=outputs/latest form=checkpoint out=weights

Load the result with AutoModelForCausalLM.from_pretrained(DIR) and AutoTokenizer.from_pretrained(DIR), or start another
run from its weights with train.init_from=hf:DIR. form=checkpoint writes fp32 weights in wordrun's own format instead,
which makes a DeepSpeed checkpoint readable without DeepSpeed. See docs/generate.md for details.
"""


@dataclass
class ExportConfig(Section):
    """The checkpoint, and the location and format of the export."""

    run: str = "outputs/latest"
    """Run directory, or a checkpoint in it."""
    out: str | None = None
    """Folder to create, which must not exist; null: FORM/step-NUMBER in the run directory."""
    form: str = "huggingface"
    """huggingface (for transformers), checkpoint (for train.init_from, wordrun generate and wordrun export), or peft
    (LoRA's adapters alone, for the peft library)."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: str = "model"
    """model, or ema for the averaged weights of a run with hooks=[ema]."""
    dtype: str = "fp32"
    """Precision of the exported weights: fp32, bf16 or fp16."""
    shard_gb: float = 4.0
    """Maximum size of a weights file in GB (10^9 bytes), unless a single tensor is larger; export needs this much
    memory."""

    def problems(self) -> Iterable[str]:
        yield from one_of("dtype", self.dtype, [dtype for dtype in DTYPES if dtype != "auto"])
        yield from one_of("form", self.form, ["huggingface", "checkpoint", "peft"])
        yield from above_zero("", self, "shard_gb")
        if self.out is not None and Path(self.out).exists():
            yield f"out={self.out} already exists: remove it, or choose another folder"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    try:
        return run(ExportConfig, USAGE, lambda options: print(export(options)), argv)
    except KeyboardInterrupt:
        return 130


def export(options: ExportConfig) -> Path:
    """Write the folder described by ``options`` and return its path.

    Raises:
        ConfigError: if the folder exists.
        UserError: if there is no such checkpoint or the folder cannot be written to.
    """
    # Imported here so that --help and error messages do not wait for torch.
    from wordrun.checkpoint.load import find
    from wordrun.data.tokenizers.construction import from_checkpoint
    from wordrun.data.tokenizers.huggingface import require_convertible

    saved = find(Path(options.run), options.checkpoint)
    if options.form != "checkpoint":
        saved.require_text()
        check_has_huggingface_format(saved.config.model)
    if options.form == "huggingface":  # before the weights are written
        ours = from_checkpoint(saved.tokenizer_json, saved.tokenizer_file)
        require_convertible(json.loads(ours.to_json()))
    name = saved.folder.name if options.weights == "model" else f"{saved.folder.name}-{options.weights}"
    out = Path(options.out or saved.folder.parent.parent / options.form / name)
    if out.exists():
        raise ConfigError(f"{out} already exists: remove it, or choose another folder with out=DIR")
    draft = out.with_name(f".{out.name}.new")  # so an interrupted export never looks complete
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        # DeepSpeed prints while reading its checkpoints. After Ctrl-C, no part of an export should be left behind.
        with contextlib.redirect_stdout(sys.stderr), sigint.raising():
            if options.form == "checkpoint":
                write_checkpoint(draft, saved, options.weights)
            elif options.form == "peft":
                write_adapter(draft, saved, DTYPES[options.dtype], options.weights)
            elif not isinstance(saved.config.model, TransformerConfig):
                write_model(draft, saved, DTYPES[options.dtype], int(options.shard_gb * 1e9), options.weights)
            else:
                write_weights(draft, saved, DTYPES[options.dtype], int(options.shard_gb * 1e9), options.weights)
                write_config_and_tokenizer(draft, saved, DTYPES[options.dtype])
        for file in draft.glob("*.safetensors"):  # the library makes them readable by the owner only
            file.chmod(draft.stat().st_mode & 0o666)
        draft.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or draft}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def write_model(folder: Path, saved: Saved, dtype: str, limit: int, which: str = "model") -> None:
    """Write a model that has a Hugging Face format of its own, and its tokenizer."""
    import torch

    from wordrun.backend.mixed_precision import TORCH_DTYPES

    saved.load_model(torch.device("cpu"), TORCH_DTYPES[dtype], which).write_huggingface(folder, limit)
    write_tokenizer(folder, saved, as_it_was=True)


def write_weights(folder: Path, saved: Saved, dtype: str, limit: int, which: str = "model") -> None:
    """Write the weights of ``saved`` as safetensors files, of at most ``limit`` bytes unless one weight is larger."""
    from safetensors.torch import save_file

    from wordrun.backend.mixed_precision import TORCH_DTYPES
    from wordrun.model import mup
    from wordrun.model.huggingface import to_huggingface

    cfg, kind = saved.config.transformer, TORCH_DTYPES[dtype]
    weights = mup.folded(saved.weights(which), cfg)
    model = saved.transformer()
    shards: list[list[str]] = [[]]
    room = limit
    # Plan the files on the meta model first: each file name includes the number of files.
    for name, shape in model.state_dict().items():
        if model.tied and name == "head.weight":
            continue
        size = sum(tensor.numel() * kind.itemsize for tensor in to_huggingface({name: shape}, cfg).values())
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            theirs = to_huggingface({name: weights[name]}, cfg)
            tensors |= {their_name: tensor.to(kind) for their_name, tensor in theirs.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, file)
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", index)


def write_config_and_tokenizer(folder: Path, saved: Saved, dtype: str) -> None:
    """Write config.json and, unless the vocabulary is missing, the tokenizer files."""
    from wordrun.backend.mixed_precision import TORCH_DTYPES
    from wordrun.model.huggingface import huggingface_config

    facts = huggingface_config(saved.config.transformer, saved.transformer().vocab_size)
    normalizer, end = write_tokenizer(folder, saved)
    facts |= {"bos_token_id": end, "eos_token_id": end}
    _write_json(folder / "config.json", {**facts, "torch_dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch.")})
    if facts["model_type"] == "qwen2" and normalizer not in ("NFC", None):  # Qwen's own has it
        print(
            "load the tokenizer with transformers.PreTrainedTokenizerFast: for models of this type, AutoTokenizer of "
            "transformers 5 splits text like Qwen's tokenizer, not like this one",
            file=sys.stderr,
        )


def write_tokenizer(folder: Path, saved: Saved, *, as_it_was: bool = False) -> tuple[str | None, int | None]:
    """Write the tokenizer's files, unless its vocabulary is missing.

    Args:
        folder: where to write them.
        saved: the checkpoint.
        as_it_was: copy the files of the folder from which the tokenizer was read, if they are still there.

    Returns:
        The type of the tokenizer's normalizer, None: it is not written; and the end-of-text token.
    """
    from wordrun.data.chat_template import template_of
    from wordrun.data.tokenizers.construction import from_checkpoint
    from wordrun.data.tokenizers.huggingface import chat_template, tokenizer_json

    ours, cfg = from_checkpoint(saved.tokenizer_json, saved.tokenizer_file), saved.config
    if ours.missing:
        print(f"exported without its tokenizer: {ours.missing}", file=sys.stderr)
        return None, ours.eot
    tokenizer, end = tokenizer_json(json.loads(ours.to_json()))
    normalizer = (tokenizer.get("normalizer") or {}).get("type", "")
    if as_it_was and cfg.data.kind not in ANSWERED and (source := _folder_of(tokenizer, cfg.tokenizer)):
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return normalizer, end
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": cfg.text_model.block_size,
        "clean_up_tokenization_spaces": False,  # a space before a comma is part of the text
    }
    if (data := cfg.text).kind == "pairs":
        text = next((token["content"] for token in tokenizer.get("added_tokens", []) if token["id"] == end), "")
        settings["chat_template"] = chat_template(data.template_parts(), text)
    elif data.kind == "chat":
        template = template_of(data, ours)
        settings |= {**template.names, "chat_template": template.source}
        _write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": template.stops(ours)})
        if not tokenizer["added_tokens"] and ours.eot_text in template.specials:  # part of the template's text
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added = {"id": end, "content": ours.eot_text, "special": True, **flags}
            _write_json(folder / "tokenizer.json", {**tokenizer, "added_tokens": [added]})
    _write_json(folder / "tokenizer_config.json", settings)
    return normalizer, end


def _folder_of(tokenizer: Mapping[str, Any], options: Any) -> Path | None:
    """Return the folder with this ``tokenizer`` that its ``options`` name, if it is still there, with its settings."""
    folder = Path(getattr(options, "path", None) or "")
    try:
        json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        same = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) == tokenizer
    except (OSError, ValueError):
        return None
    return folder if same else None


def write_adapter(folder: Path, saved: Saved, dtype: str, which: str) -> None:
    """Write LoRA's adapters in a form that the peft library reads.

    Raises:
        UserError: the checkpoint is not LoRA's.
    """
    from safetensors.torch import save_file

    from wordrun.backend.mixed_precision import TORCH_DTYPES
    from wordrun.model.huggingface import adapter

    if saved.lora is None:
        raise UserError(f"form=peft needs a run with model.lora_rank; {saved.folder} is from a run without: omit it")
    kind, source = TORCH_DTYPES[dtype], str(saved.manifest["base"]["source"])
    facts, tensors = adapter(saved.stored(which), saved.lora)
    save_file({name: tensor.to(kind) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    _write_json(folder / "adapter_config.json", {**facts, "base_model_name_or_path": source.removeprefix("hf:")})


def write_checkpoint(folder: Path, saved: Saved, which: str = "model") -> None:
    """Write the weights of ``saved`` as a checkpoint that any backend can start from but no run can resume."""
    from wordrun.checkpoint import folder as folders, shards
    from wordrun.checkpoint.load import ARGUMENTS, MODEL

    weights = saved.weights(which)
    mine = [shards.shard_of(MODEL + name, weights[name]) for name in weights]
    shards.write(folder, mine)
    shards.write_index(folder)
    if saved.tokenizer_json:
        (folder / folders.TOKENIZER).write_text(saved.tokenizer_json, encoding="utf-8")
    files = folders.describe(folder, [path.name for path in folder.iterdir()])
    folders.write_manifest(
        folder,
        {
            **{name: saved.manifest[name] for name in ("step", *ARGUMENTS) if name in saved.manifest},
            "config": to_plain(saved.config),
            "backend": {"kind": "weights"},
            "files": files,
            "shards": 0,  # with a checksum in their own header alone: ``files`` has those of all files
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
