"""Files from elsewhere: whatever they contain, reading them runs nothing, and what is wrong is one message."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import wordrun
from wordrun.checkpoint import folder as folders, index
from wordrun.checkpoint.load import find
from wordrun.common.errors import UserError
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.model import huggingface_files

if TYPE_CHECKING:
    from conftest import SaveRun

Seal = Callable[..., None]
TINY = ("model.n_embd=4", "model.n_head=1", "model.block_size=4")


class Trap:
    """Creates the file "ran" when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("ran", "w")


def archive() -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2), "trap": Trap()}, file)
    return file.getvalue()


def numpys() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Trap()], dtype=object), allow_pickle=True)
    return file.getvalue()


PICKLES = {
    "pickle": pickle.dumps(Trap()),
    "old pickle": pickle.dumps(Trap(), 0),
    "torch.save": archive(),
    "numpy.save": numpys(),
}


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(AttributeError):
        pickle.loads(PICKLES["pickle"]).close()
    assert Path("ran").exists(), "the trap works"
    Path("ran").unlink()


def read(run: Path, *, model: bool = True) -> dict[str, torch.Tensor]:
    """Read everything that generating text would read; ``model=False`` leaves out what takes the longest."""
    saved = find(run)
    tokenizers.from_checkpoint(saved.tokenizer_json, saved.tokenizer_file)
    if model:
        saved.meta_model()
    return dict(saved.weights())


@pytest.fixture
def checkpoint(save_run: SaveRun) -> Path:
    save_run(Path("run"), *TINY)
    folder = Path("run/checkpoints/step-00000100")
    assert read(Path("run"))
    return folder


@pytest.mark.parametrize("kind", PICKLES)
def test_no_file_of_a_checkpoint_runs_anything(checkpoint: Path, seal: Seal, kind: str) -> None:
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        file.write_bytes(PICKLES[kind])
        if file.name != folders.MANIFEST:
            seal(checkpoint)  # sizes and checksums are forged along
        with pytest.raises(UserError, match=file.name):
            read(Path("run"))
        assert not Path("ran").exists(), file
        file.write_bytes(content)


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "config.json", "pytorch_model.bin.index.json"]
)
def test_weights_of_hugging_face_run_nothing(name: str, kind: str) -> None:
    Path(name).write_bytes(PICKLES[kind])
    with pytest.raises(UserError, match=name):
        huggingface_files.read_config(Path()) if name == "config.json" else huggingface_files.open_files(Path())
    assert not Path("ran").exists()


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("name", ["meta.pkl", "tokenizer.json", "manifest.json", "train_000.npy"])
def test_tokens_of_others_run_nothing(name: str, kind: str) -> None:
    for split in ("train", "val"):
        np.save(f"{split}_000.npy", np.arange(200, dtype="<u2"))
    Path(name).write_bytes(PICKLES[kind])
    words = ["data=shards", "data.path=.", "model=nano", "train.device=cpu", "tracker=jsonl"]
    tokenizer = "char" if name == "meta.pkl" else "byte"
    with pytest.raises(UserError, match=re.escape(name)):
        wordrun.Trainer(wordrun.compose([*words, f"tokenizer={tokenizer}", "hydra.run.dir=run"]))
    assert not Path("ran").exists()


# Damage


STRANGE = (
    *(None, True, -1, 0, 1, 2, 7.5, 2**31, 10**12, 10**30, float("nan")),
    *("", "x", "../x", "/etc/passwd", "\x00", "float64", "shards-00000.safetensors"),
    *([], [[]], {}, [10**12, 10**12], [0] * 40),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value, as a container and a key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in items for place in [(value, key), *places(each)]]


def swapped(content: Any, rng: random.Random) -> Any:
    """Return JSON with a value that is another's, strange, or gone."""
    all_of_them = places(content)
    container, key = rng.choice(all_of_them)
    choice = rng.random()
    if choice < 0.2:
        del container[key]
    elif choice < 0.4:
        other, its = rng.choice(all_of_them)
        container[key] = json.loads(json.dumps(other[its]))
    else:
        container[key] = rng.choice(STRANGE)
    return content


def damaged(content: bytes, rng: random.Random, header: int) -> bytes:
    """Return ``content`` with a flipped bit (mostly in its first ``header`` bytes), cut short, or with a JSON swap."""
    how = rng.random()
    if how < 0.4 and content[:1] == b"{":
        return json.dumps(swapped(json.loads(content), rng)).encode()
    if how < 0.4 and content[8:9] == b"{":
        text = json.dumps(swapped(json.loads(content[8:header]), rng)).encode()
        return struct.pack("<Q", len(text)) + text + content[header:]
    if how < 0.5:
        return content[: rng.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 8))):
        changed[rng.randrange(min(len(content), header if rng.random() < 0.9 else len(content)))] ^= 1 << rng.randrange(
            8
        )
    return bytes(changed)


def test_damage_is_one_message(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time the checksums are forged along, so that what is behind them is read."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    folder = checkpoint
    whole, files = read(Path("run")), {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    manifest = json.loads(files["manifest.json"])
    rng, told = random.Random("ours"), list[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(3000):
        name, forged = rng.choice([*files]), number % 2 == 0
        length = struct.unpack("<Q", files[name][:8])[0] + 8 if name.endswith("safetensors") else 2**20
        content = damaged(files[name], rng, length)
        (folder / name).write_bytes(content)
        if forged and name == "manifest.json":
            with contextlib.suppress(ValueError, AttributeError):
                changed = json.loads(content)
                changed.pop("crc32", None)
                (folder / name).write_text(json.dumps({**changed, "crc32": folders.checksum(changed)}))
        elif forged:
            facts = manifest["files"] | folders.describe(folder, [name])
            folders.write_manifest(folder, {**{k: v for k, v in manifest.items() if k != "crc32"}, "files": facts})
        try:
            found = read(Path("run"), model=name in ("manifest.json", index.INDEX))
            assert forged or all(found[key].equal(whole[key]) for key in whole)
        except UserError as error:
            told.append(str(error))
        for each in (name, "manifest.json"):
            (folder / each).write_bytes(files[each])
    assert len(told) > number // 2
    assert [message for message in told if folder.name not in message] == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, (
        "KiB: something large was allocated"
    )
