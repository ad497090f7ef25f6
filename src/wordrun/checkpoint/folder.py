"""A run's checkpoints as folders: ``checkpoints/step-00000100``, complete once its manifest says so.

Nothing here needs torch. Writing goes to a hidden temporary name; the manifest, with sizes and checksums of all other
files, is written last, and then the folder gets its name: an interrupted save can never be taken for a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordrun import files
from wordrun.errors import UserError

FORMAT = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHECKPOINTS = "checkpoints"
# Checksums are of pieces of this size: a large file is checked without being in memory.
PIECE = 2**26
NAME = re.compile(r"step-(\d{8,})")


class DamagedError(UserError):
    """A checkpoint lacks a file, or holds other bytes than were written."""


@dataclass(frozen=True)
class Folder:
    """A checkpoint that has its name, and so was whole when it was written."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any]:
        """Return what the checkpoint says of itself.

        Raises:
            DamagedError: the manifest is missing or no JSON.
            UserError: a newer wordrun has written it.
        """
        try:
            manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            whole = manifest.pop("crc32") == _seal(manifest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{self.path} is damaged: {MANIFEST}: {error}") from None
        if not whole:
            raise DamagedError(f"{self.path} is damaged: {MANIFEST} holds other bytes than were written (checksum)")
        if manifest["format"] > FORMAT:
            raise UserError(
                f"{self.path} has format {manifest['format']}, this wordrun reads up to {FORMAT}: use a newer wordrun"
            )
        return manifest

    def check_sizes(self) -> dict[str, Any]:
        """Return the manifest, if every file is there and as long as it says.

        Raises:
            DamagedError: names the first file that is not.
        """
        manifest = self.manifest()
        for name, facts in manifest["files"].items():
            try:
                size = (self.path / name).stat().st_size
            except OSError as error:
                raise DamagedError(f"{self.path} is damaged: {name}: {error.strerror}") from None
            if size != facts["size"]:
                raise DamagedError(f"{self.path} is damaged: {name} has {size:,} bytes, not {facts['size']:,}")
        return manifest

    def check_content(self, names: Iterable[str], manifest: Mapping[str, Any]) -> str:
        """Return what is wrong with the content of the files ``names``, empty if nothing is."""
        for name in names:
            try:
                found = checksums(self.path / name)
            except OSError as error:
                return f"{self.path} is damaged: {name}: {error.strerror}"
            if found != manifest["files"][name]["crc32"]:
                return f"{self.path} is damaged: {name} holds other bytes than were written (checksum)"
        return ""


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def all_in(run_dir: Path) -> list[Folder]:
    """Return the checkpoints of a run, the oldest first, without a look inside."""
    try:
        names = os.listdir(run_dir / CHECKPOINTS)
    except OSError:
        return []
    found = [(int(match[1]), name) for name in names if (match := NAME.fullmatch(name))]
    return [Folder(run_dir / CHECKPOINTS / name, step) for step, name in sorted(found)]


def locate(path: Path) -> tuple[Path, list[Folder]]:
    """Return the run directory that ``path`` is or lies in, and the checkpoints meant, the oldest first.

    Args:
        path: a run directory (all of its checkpoints are meant), its ``checkpoints``, or one checkpoint.

    Raises:
        UserError: there is no such folder, or no checkpoint in it.
    """
    path = Path(os.path.expanduser(path))
    if not path.is_dir():
        raise UserError(f"{path} is no folder: name a run directory, or one of its {CHECKPOINTS}/step-...")
    path = path.resolve()  # latest and best are links
    if (path / MANIFEST).exists() or NAME.fullmatch(path.name):
        match = NAME.fullmatch(path.name)
        step = int(match[1]) if match else Folder(path, 0).manifest()["step"]
        return path.parent.parent if path.parent.name == CHECKPOINTS else path.parent, [Folder(path, step)]
    run_dir = path.parent if path.name == CHECKPOINTS else path
    found = all_in(run_dir)
    if not found:
        raise UserError(
            f"{run_dir} holds no checkpoint: it is not a run directory, or the run ended before its first save "
            "(train.checkpoint_interval)"
        )
    return run_dir, found


def choose(run_dir: Path, which: str) -> list[Folder]:
    """Return the checkpoints of a run that ``which`` may mean, the first choice last.

    Args:
        run_dir: a run directory, or a checkpoint itself, which then is the only choice.
        which: latest (older ones stand in for damaged ones), best, or a number of steps.

    Raises:
        UserError: there is none; the message lists those there are.
    """
    run_dir, found = locate(run_dir)
    if which == "latest":
        return found
    if which == "best":
        best = run_dir / CHECKPOINTS / "best"
        if best.exists():
            return [each for each in found if each.path.name == best.resolve().name]
    elif which.isdigit():
        chosen = [each for each in found if each.step == int(which)]
        if chosen:
            return chosen
    steps = ", ".join(str(each.step) for each in found)
    raise UserError(f"{run_dir} has no checkpoint {which}: there are latest and those after {steps} steps")


class Draft:
    """A checkpoint that is being written, a hidden folder until ``publish``; all of this is for rank 0 alone."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.step = step
        self.path = run_dir / CHECKPOINTS / f".{folder_name(step)}.new"

    def begin(self, tokenizer_json: str) -> None:
        """Make the folder, with the tokenizer alone and without what an interrupted save has left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for left in self.path.parent.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        self.path.mkdir()
        write_text(self.path / TOKENIZER, tokenizer_json)

    def publish(self, manifest: Mapping[str, Any]) -> Folder:
        """Write the manifest and give the folder its name; return it."""
        final = self.path.parent / folder_name(self.step)
        write_manifest(self.path, {"step": self.step, **manifest})
        sync_folder(self.path)
        if final.exists():  # the same step again, after a roll back
            final.rename(self.path.with_suffix(".old"))
        self.path.rename(final)
        sync_folder(final.parent)
        shutil.rmtree(self.path.with_suffix(".old"), ignore_errors=True)
        files.point(final.parent / "latest", final.name)
        return Folder(final, self.step)

    def discard(self) -> None:
        """Remove what has been written."""
        shutil.rmtree(self.path, ignore_errors=True)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, with a checksum of itself; it is the last file of a checkpoint."""
    whole = {"format": FORMAT, **content}
    write_text(folder / MANIFEST, json.dumps({**whole, "crc32": _seal(whole)}, indent=1))


def _seal(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def prune(run_dir: Path, newest: int, keep: int) -> None:
    """Remove all checkpoints but the last ``keep`` up to the step ``newest``, and the best one.

    Later ones are damaged, or of a past that the run has gone back behind.
    """
    folder = run_dir / CHECKPOINTS
    best = (folder / "best").resolve().name
    found = all_in(run_dir)
    kept = [each.step for each in found if each.step <= newest][-keep:]
    for old in found:
        if old.step not in kept and (old.path.name != best or old.step > newest):
            # Under another name first: a checkpoint that is half removed must not look like one.
            gone = folder / f".{old.path.name}.gone"
            old.path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def checksums(path: Path) -> list[int]:
    """Return the CRC-32 of each piece of a file."""
    found: list[int] = []
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(PIECE, max(1, os.fstat(file.fileno()).st_size))))
        while True:
            length = 0
            while length < len(buffer) and (n := file.readinto(buffer[length:])):
                length += n
            if not length:
                return found
            found.append(zlib.crc32(buffer[:length]))


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and checksums of the files ``names``, for the manifest."""
    return {name: {"size": (folder / name).stat().st_size, "crc32": checksums(folder / name)} for name in names}


def write_text(path: Path, text: str) -> None:
    """Write a small file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some parallel file systems do without
        pass
    finally:
        os.close(descriptor)
