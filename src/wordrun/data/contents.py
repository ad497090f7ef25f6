"""Tells what a file is, for every kind of data: by its suffix, or by its content if the suffix is wrong."""

from __future__ import annotations

import bz2
import errno
import gzip
import importlib
import io
import json
import lzma
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from wordrun.common.errors import ConfigError

ROWS = ("jsonl", "json", "csv", "parquet")
"""Types of files whose rows have fields."""
FORMATS = ("text", *ROWS)
"""Types of files that contain text; the values of data.format."""
TYPES = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".tex"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".json": "json",
    ".parquet": "parquet",
    **dict.fromkeys((".bin", ".npy"), "tokens"),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".tif", ".tiff", ".webp"), "image"),
}
"""The type of a file by its suffix in lower case. Other files, such as .py, are read as text with data.format=text."""
PACKED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""The compression of a file by its last suffix."""
OTHERS = {
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z"), "an archive: unpack it"),
    ".arrow": "an Arrow table: data=hf data.dataset=FOLDER reads it",
    ".idx": "an index of Megatron-LM's tokens: data=shards data.path=FOLDER reads them",
    ".mds": "a shard of MosaicML's MDS format, which is not supported: convert it to .jsonl or .parquet",
}
"""What files with suffixes not in TYPES are, and the remedy."""
ELSEWHERE = {"tokens": "tokens: data=shards data.path=FOLDER reads them", "image": "an image: see data=imagefolder"}
"""Messages for files of types that are not text."""
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"PAR1": "parquet",
    b"ARROW1": ".arrow",
    b"PK\3\4": ".zip",
    b"MMIDIDX": ".idx",
    b"\x93NUMPY": "tokens",
    b"\x89PNG": "image",
    b"\xff\xd8\xff": "image",
}
"""Maps the first bytes of files to a compression, a type, or a suffix in OTHERS."""
SPECIAL = {
    stat.S_IFIFO: "a named pipe, which can be read only once: save its content as a file",
    stat.S_IFSOCK: "a socket, not a file",
    stat.S_IFCHR: "a device, not a file",
    stat.S_IFBLK: "a device, not a file",
    stat.S_IFDIR: "a folder, not a file",
}
BINARY = "a binary file"
UNKNOWN, UNNAMED = "of unknown type", "without a suffix"
PROBED = 2**16
"""Bytes at the beginning of a file that show what it is."""
SMALL, MOST_RATIO = 2**26, 200
"""A compressed file may decompress to SMALL bytes, or to MOST_RATIO times its size; texts grow 3 to 10 times."""
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of decompressing a damaged file."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""The split of a file or folder, by a lower-case word in its name."""


@dataclass(frozen=True)
class Content:
    """What a file is."""

    type: str
    """A value of TYPES; empty: unknown."""
    packing: str = ""
    """Its compression, a value of PACKED; empty: none."""
    fault: str = ""
    """Why nothing can be read from it, with the remedy."""


def is_litter(name: str) -> bool:
    """Return whether a file or folder is left out silently: it is hidden (.git), or added by the operating system."""
    return name.startswith(".") or name in ("__MACOSX", "Thumbs.db", "desktop.ini")


def by_name(name: str) -> Content:
    """Return what a file is according to its suffixes, in upper or lower case."""
    stem = name.lower()
    packing = PACKED.get(PurePath(stem).suffix, "")
    suffix = PurePath(stem if not packing else PurePath(stem).stem).suffix
    if suffix in TYPES:
        return Content(TYPES[suffix], packing)
    return Content("", packing, OTHERS.get(suffix, UNKNOWN) if suffix else UNNAMED)


def reject_special_file(path: Path) -> None:
    """Raise OSError if ``path`` is neither a file nor missing: reading a named pipe could wait forever."""
    kind = stat.S_IFMT(path.stat().st_mode) if path.exists() else stat.S_IFREG
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, SPECIAL[kind])


def by_content(path: Path, wanted: str | None = None) -> Content:
    """Return what the file at ``path`` is, from its suffix and its beginning.

    Args:
        path: a file, which need not exist.
        wanted: data.format, which overrides the suffix.
    """
    named = by_name(path.name)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return Content("", fault=SPECIAL[stat.S_IFMT(mode)])
        with open(path, "rb") as file:
            head = file.read(PROBED)
        packing = next((kind for kind in PACKED.values() if _magic(head) == kind), "")
        if named.packing and head and packing != named.packing:
            return Content("", fault="damaged")
        if packing:
            with opened(path, packing) as file:
                head = file.read(PROBED)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}" if error.strerror else "damaged"
        return Content("", fault=reason)
    except (EOFError, zlib.error, lzma.LZMAError):
        return Content("", fault="damaged")
    found = _of_head(head, wanted or named.type, named.fault)
    return Content(found.type, packing, found.fault)


def _of_head(head: bytes, type_: str, unnamed: str) -> Content:
    """Return what a file is, given its decompressed beginning.

    Args:
        head: its beginning.
        type_: its type according to its name or data.format.
        unnamed: why ``type_`` is empty.
    """
    if not head or (len(head) < PROBED and head.removeprefix(b"\xef\xbb\xbf").isspace()):
        return Content("", fault="empty")
    magic = _magic(head)
    if magic in OTHERS or head[257:262] == b"ustar":
        return Content("", fault=OTHERS[magic or ".tar"])
    if magic in PACKED.values():
        return Content("", fault="compressed twice: decompress it once")
    if magic == "parquet":
        return Content("parquet")
    if type_ == "parquet":
        return Content("", fault="damaged")
    if magic in ELSEWHERE or type_ in ELSEWHERE:
        return Content(type_ if type_ in ELSEWHERE else magic, fault=ELSEWHERE[magic or type_])
    if not type_ and unnamed not in (UNKNOWN, UNNAMED):
        return Content("", fault=unnamed)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return Content("", fault="text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8")
    if b"\0" in head:
        return Content("", fault=f"{BINARY} (a zero at byte {head.index(0)})")
    if type_ == "csv":
        return Content("csv")
    found = _looks_like(head, type_ or "text")
    return Content(found) if type_ or found == "jsonl" or unnamed == UNNAMED else Content("", fault=unnamed)


def _looks_like(head: bytes, type_: str = "text") -> str:
    """Return the type that ``head`` looks like: text, lines of JSON or a JSON value; ``type_`` is that of the name."""
    beginning = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if type_ != "text" and beginning[:1] == b"[":
        return "json"
    if beginning[:1] != b"{":
        return "jsonl" if type_ == "jsonl" else type_
    lines = [line for line in beginning.split(b"\n")[: None if len(head) < PROBED else -1] if line.strip()]
    if type_ != "text":
        return "jsonl" if type_ == "jsonl" or (lines and _is_object(lines[0])) else "json"
    return "jsonl" if lines and all(map(_is_object, lines)) else "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _magic(head: bytes) -> str:
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")


def optional(module: str, user: str) -> Any:
    """Import an optional dependency that ``user`` needs.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{user} needs {module.partition('.')[0]}: pip install 'wordrun[hf]'") from None


def opened(path: str | Path, packing: str) -> Any:
    """Open a file for reading bytes, decompressed.

    Reading more decompressed bytes than MOST_RATIO times the file's size raises a ConfigError.
    """
    if packing == "gzip":
        file: Any = gzip.open(path, "rb")  # noqa: SIM115
    elif packing == "zstd":
        # Unlike zstandard's reader, this one detects truncated files.
        file = optional("pyarrow", str(path)).input_stream(str(path), compression="zstd")
    elif packing:
        file = bz2.open(path, "rb") if packing == "bz2" else lzma.open(path, "rb")  # noqa: SIM115
    else:
        return open(path, "rb")
    return io.BufferedReader(_Bounded(file, path), 2**18)


class _Bounded(io.RawIOBase):
    """A decompressed file whose size is bounded, since a small file can decompress to more than any disk holds."""

    def __init__(self, file: Any, path: str | Path) -> None:
        self._file, self._path, self._size = file, path, os.stat(path).st_size
        self._read = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` and return the number of bytes.

        Raises:
            ConfigError: there are too many of them in all.
        """
        count: int = self._file.readinto(buffer)
        self._read += count
        if self._read > max(SMALL, MOST_RATIO * self._size):
            raise ConfigError(
                f"{self._path} has {self._size:,} bytes and decompresses to {self._read // max(1, self._size):,} times "
                f"as many or more (at most {MOST_RATIO} times or {SMALL // 2**20} MiB are read): if that is right, "
                "decompress it and use the plain file"
            )
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def split_of(name: str) -> str | None:
    """Return the split (train, val or test) that a word of ``name`` names; None: no word does, or several."""
    found = {SPLITS[word] for word in re.split("[^a-z]+", name.lower()) if word in SPLITS}
    return found.pop() if len(found) == 1 else None


def below(folder: str) -> Iterator[Path]:
    """Yield the files in ``folder`` and below, also in linked folders, and links to folders that are yielded anyway."""
    seen = {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, followlinks=True):
        inside = [os.path.join(parent, name) for name in sorted(folders) if not is_litter(name)]
        folders[:] = []
        for path in sorted(inside, key=os.path.islink):
            if (real := os.path.realpath(path)) in seen:
                yield Path(path)
            else:
                seen.add(real)
                folders.append(os.path.basename(path))
        yield from (Path(parent, name) for name in names if not is_litter(name))


def few(names: Sequence[str], most: int = 3) -> str:
    """Return a list of up to ``most`` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def described(types: Iterable[str]) -> str:
    """Return how many files there are of each of ``types``, such as "3 files (2 text, 1 jsonl)"."""
    found = list(types)
    counts = ", ".join(f"{found.count(each)} {each}" for each in dict.fromkeys(found))
    return f"{len(found):,} file{'s' * (len(found) != 1)} ({counts})"
