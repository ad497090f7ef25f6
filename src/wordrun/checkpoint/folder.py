"""A run's checkpoints as folders, such as ``checkpoints/step-00000100``.

Nothing here needs torch. Files are written to a hidden temporary folder. The manifest, with the sizes and checksums of
all others, comes last. Then the folder is renamed, so that an interrupted save is never mistaken for a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from wordrun.checkpoint import checksums
from wordrun.common import files, run_dir as run_dirs
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.run_dir import CHECKPOINT, CHECKPOINTS, MANIFEST

FORMAT = 4
TOKENIZER = "tokenizer.json"
SUFFIX = ".safetensors"
FIELDS = {"step": int, "files": dict, "shards": int, "config": dict, "backend": dict}
"""What every manifest contains."""


class DamagedError(UserError):
    """A checkpoint lacks a file, or a file differs from what was written."""

    page = "checkpoints.md#what-a-checkpoint-contains"


class LostError(UserError):
    """A checkpoint that was not on disk can no longer be read; nothing of it has been loaded."""

    page = "faults.md#checkpoints-in-memory"


@dataclass(frozen=True)
class Folder:
    """A checkpoint that was complete when it was written."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any]:
        """Return the manifest after verifying its checksum and its structure.

        Raises:
            DamagedError: the manifest is missing, or is not valid.
            UserError: another version of wordrun wrote it, in another format.
        """
        try:
            manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            is_intact = manifest.pop("crc32") == checksum(manifest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{self.path} is damaged: {MANIFEST}: {error}") from None
        if not is_intact:
            raise DamagedError(f"{self.path} is damaged: {MANIFEST} does not match its checksum")
        self.require(manifest, {"format": int})
        if manifest["format"] != FORMAT:
            raise UserError(
                f"{self.path} has format {manifest['format']}, this wordrun reads {FORMAT}: use the version of wordrun "
                "that wrote it"
            )
        self.require(manifest, FIELDS)
        self.require(manifest["backend"], {"kind": str})
        for name, facts in manifest["files"].items():
            path = PurePosixPath(name)
            inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
            if not inside or not isinstance(facts, dict) or not facts.keys() >= {"size", "crc32"}:
                raise DamagedError(f"{self.path} is damaged: {MANIFEST}: {name!r} does not describe a file in it")
        return manifest

    def require(self, manifest: Mapping[str, Any], fields: Mapping[str, type]) -> None:
        """Check that the manifest, or a part of it, has ``fields`` of these types.

        Raises:
            DamagedError: it lacks one, or has a value of another type.
        """
        for name, kind in fields.items():
            if type(manifest.get(name)) is not kind:
                what = f"{name} is {manifest.get(name)!r:.100}, not of type {kind.__name__}"
                raise DamagedError(f"{self.path} is damaged: {MANIFEST}: {what}")

    def check(self, rank: int = 0, ranks: int = 1, *, content: bool = True) -> dict[str, Any]:
        """Return the manifest after checking one rank's share of the files.

        Args:
            rank: this rank.
            ranks: how many ranks divide the files.
            content: compare the checksums, for which the files are read; else only their sizes.

        Raises:
            DamagedError: a file is missing, or differs from what was written; the message names it.
        """
        manifest = self.manifest()
        for name in sorted(manifest["files"])[rank::ranks]:
            if problem := self.problem(name, manifest["files"][name], content=content):
                raise DamagedError(f"{self.path} is damaged: {problem}")
        for number in range(rank, manifest["shards"], ranks):  # these files have checksums in their own headers
            if problem := checksums.problem(self.path / file_of(number), content=content):
                raise DamagedError(f"{self.path} is damaged: {problem}")
        return manifest

    def problem(self, name: str, facts: Mapping[str, Any], *, content: bool = True) -> str:
        """Return what is wrong with a file that the manifest lists, or an empty string."""
        try:
            found = (self.path / name).stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size != facts["size"]:
                return f"{name} has {found.st_size:,} bytes, not {facts['size']}"
            if content and checksums.of_chunks(self.path / name) != facts["crc32"]:
                return f"{name} does not match its checksum"
        except (OSError, ValueError) as error:
            return f"{name}: {getattr(error, 'strerror', 'not the name of a file')}"
        return ""


def file_of(rank: int) -> str:
    """Return the name of the file that ``rank`` writes."""
    return f"shards-{rank:05d}{SUFFIX}"


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def all_in(run_dir: Path) -> list[Folder]:
    """Return the checkpoints of a run, oldest first, without reading them."""
    return [Folder(path, step) for step, path in run_dirs.checkpoints_in(run_dir)]


def locate(path: Path) -> tuple[Path, list[Folder]]:
    """Return the run directory of ``path`` and the checkpoints that it refers to, oldest first.

    Args:
        path: a run directory (all of its checkpoints), its ``checkpoints``, or one checkpoint.

    Raises:
        ConfigError: there is no such folder, or no checkpoint in it.
    """
    run_dir, named = run_dirs.locate(path)
    if named is None:
        return run_dir, all_in(run_dir)
    match = CHECKPOINT.fullmatch(named.name)  # a copy may have another name
    return run_dir, [Folder(named, int(match[1]) if match else Folder(named, 0).manifest()["step"])]


def choose(run_dir: Path, which: str) -> list[Folder]:
    """Return the checkpoints of a run that match ``which``, the preferred one last.

    Args:
        run_dir: a run directory, or a checkpoint, which then is the only choice.
        which: latest (older ones replace damaged ones), best, or a step number.

    Raises:
        ConfigError: none matches; the message lists the available ones.
    """
    run_dir, found = locate(run_dir)
    if which == "latest":
        return found
    step = best_in(run_dir) if which == "best" else int(which) if which.isdecimal() else None
    if chosen := [each for each in found if each.step == step]:
        return chosen
    steps = ", ".join(str(each.step) for each in found)
    raise ConfigError(f"{run_dir} has no checkpoint {which}: available are latest and steps {steps}")


class Draft:
    """A checkpoint being written, in a hidden folder until ``publish``; only rank 0 calls its methods."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.step = step
        self.path = run_dir / CHECKPOINTS / f".{folder_name(step)}.new"

    def begin(self, tokenizer_json: str | None) -> None:
        """Create the folder and write the tokenizer, if any, after removing leftovers of interrupted saves."""
        self.path.parent.mkdir(exist_ok=True)  # the run directory exists, or was removed
        for left in self.path.parent.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        if os.path.lexists(self.path):  # something in it cannot be removed, or it is not a folder
            files.set_aside(self.path, "gone")
        self.path.mkdir()
        if tokenizer_json is not None:
            files.write(self.path / TOKENIZER, tokenizer_json)

    def publish(self, manifest: Mapping[str, Any]) -> Folder:
        """Write the manifest and rename the folder, which makes it a checkpoint; return that."""
        final = self.path.parent / folder_name(self.step)
        write_manifest(self.path, {"step": self.step, **manifest})
        files.sync_folder(self.path)
        old = files.set_aside(final, "gone") if os.path.lexists(final) else None  # the same step, after a rollback
        self.path.rename(final)
        files.sync_folder(final.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return Folder(final, self.step)

    def discard(self) -> None:
        """Delete the draft."""
        shutil.rmtree(self.path, ignore_errors=True)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, the last file of a checkpoint, including its own checksum."""
    manifest = {"format": FORMAT, **content}
    files.write(folder / MANIFEST, json.dumps({**manifest, "crc32": checksum(manifest)}, indent=1))


def checksum(manifest: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a manifest, without the one in it."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def tidy(newest: Folder, keep: int, *, best: bool) -> list[str]:
    """Point the links at the checkpoint ``newest``, and remove all others except the last ``keep`` and the best one.

    Checkpoints of later steps are removed, too: they are damaged or were written before a rollback.

    Args:
        newest: a complete checkpoint of the run.
        keep: how many are kept, ``newest`` included.
        best: whether it is the best one so far.

    Returns:
        Messages about what could not be done, or was unexpected.
    """
    run_dir, problems = newest.path.parent.parent, []
    for name in ("latest", "best")[: 1 + best]:
        link = newest.path.parent / name
        try:
            if link.is_dir() and not link.is_symlink():
                problems.append(f"{link} was a folder instead of a link, and is now {files.set_aside(link).name}")
            files.point(link, newest.path.name)
        except OSError as error:
            problems.append(f"cannot point {link} at {newest.path.name}: {files.why(error)}")
    best_step, found = best_in(run_dir), all_in(run_dir)
    kept = [each.step for each in found if each.step <= newest.step][-keep:]
    for old in found:
        if old.step not in kept and (old.step != best_step or old.step > newest.step):
            try:
                # Renamed first, so that a partly removed folder is not mistaken for a checkpoint.
                gone = files.set_aside(old.path, "gone")
            except OSError as error:
                problems.append(f"cannot remove {old.path}: {files.why(error)}")
                continue
            shutil.rmtree(gone, ignore_errors=True)
            if os.path.lexists(gone):
                problems.append(f"cannot remove all of {old.path}: remove {gone}")
    return problems


def best_in(run_dir: Path) -> int | None:
    """Return the step of the best checkpoint of a run; None: it has none.

    A copy that was made without links has a folder instead of the link.
    """
    best = run_dir / CHECKPOINTS / "best"
    if match := CHECKPOINT.fullmatch(os.path.basename(os.path.realpath(best))):
        return int(match[1])
    try:
        return int(Folder(best, 0).manifest()["step"])
    except UserError:
        return None


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and checksums of the files ``names``, for the manifest."""
    return {
        name: {"size": (folder / name).stat().st_size, "crc32": checksums.of_chunks(folder / name)} for name in names
    }
