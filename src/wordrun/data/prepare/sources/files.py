"""Text files: .txt, .md, .jsonl (plain or compressed) and .parquet, read completely or in parts."""

from __future__ import annotations

import errno
import glob
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from wordrun.common.errors import ConfigError, first_line
from wordrun.data.manifest import few
from wordrun.data.options import TextConfig
from wordrun.data.prepare.sources.base import Document, Source, WorkItem, cleaned, optional

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Types of files to read from a folder."""
PROBED = 2**16
"""Bytes at the beginning of a file that show whether it can be text."""
MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}
"""The first bytes of each other type of file, by suffix."""
MAX_LINE = 2**20
"""Maximum number of bytes to search for a line break before cutting the text anyway."""
Part = tuple[str, str, int, int, int]
"""Kind, path, start, stop and size of a work item."""


class FileSource(Source):
    """The files given by data.path."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is cached: the source is sent to every worker."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def files(self) -> list[Path]:
        """Return the file, or the files in the folder or matching the glob, sorted by name.

        Raises:
            ConfigError: if there are none.
        """
        return self._files

    @cached_property
    def _files(self) -> list[Path]:
        path = str(self.path)
        if os.path.isdir(path):
            found = list(_in_folder(path))
            what = f"has no {', '.join(SUFFIXES)}: name a folder with some"
        elif glob.has_magic(path) and not os.path.exists(path):
            found = [Path(p) for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
            what = "matches no file: put it in quotes, so that the shell does not expand it, and check the spelling"
        elif os.path.exists(path):
            return [Path(path).absolute()]
        else:
            found, what = [], f"cannot be read: {os.strerror(errno.ENOENT)}. Name a text file that you may read"
        if not found:
            raise ConfigError(f"data.path={path} {what}")
        return sorted(p.absolute() for p in found)

    @cached_property
    def _faults(self) -> dict[Path, str]:
        """Files among several that cannot be used, and why."""
        files = self.files()
        return {path: fault for path in files if (fault := _fault(path))} if len(files) > 1 else {}

    def left_out(self) -> list[str]:
        """Return the files that are left out because they are empty, unreadable or binary, each with the reason."""
        return [f"{path} ({fault})" for path, fault in self._faults.items()]

    def items(self) -> list[WorkItem]:
        """Return work items of about data.shard_mb each; a compressed file is a single item."""
        files = [path for path in self.files() if path not in self._faults]
        if not files:
            raise ConfigError(f"data.path={self.path} has no file that can be used: {few(self.left_out())}")
        parts = [part for path in files for part in _parts(path, self.data.shard_mb * 2**20, self.data)]
        return [WorkItem(number, *part) for number, part in enumerate(parts)]

    def single_text(self) -> WorkItem | None:
        """Return the work item for the complete file if the source is one plain text file, else None."""
        paths = self.files()
        if len(paths) > 1:
            return None
        part = _parts(paths[0], sys.maxsize, self.data)[0]
        return WorkItem(0, *part) if part[0] == "text" else None

    def beginning(self, item: WorkItem, characters: int) -> WorkItem:
        """Return the beginning of a part of a text; a character has at most four bytes."""
        if item.kind != "text":
            return item
        start, stop = extent(item)
        return replace(item, start=start, stop=min(stop, start + 4 * characters))

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the texts of ``item``."""
        if item.kind == "text":
            return _of_text(item)
        return cleaned(_of_rows(item, self.data) if item.kind == "parquet" else _of_lines(item, self.data))


def _in_folder(folder: str) -> Iterator[Path]:
    """Yield the files of known types in ``folder`` and below, except in hidden folders such as .git and .venv."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.endswith(SUFFIXES) and not name.startswith(".") and path.is_file():
                yield path


def _fault(path: Path) -> str | None:
    """Return why nothing can be read from a file, according to its beginning; None: it looks right."""
    try:
        with open(path, "rb") as file:
            head = file.read(PROBED)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not head or (len(head) < PROBED and head.isspace()):
        return "empty"
    if magic := MAGIC.get(path.suffix):
        return None if head.startswith(magic) else "damaged"
    return "binary" if b"\0" in head else None


def _parts(path: Path, most: int, data: TextConfig) -> list[Part]:
    """Return the parts of one file, of about ``most`` bytes each."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        message = f"data.path={path} cannot be read: {error.strerror}. Name a text file that you may read"
        raise ConfigError(message) from None
    if size == 0:
        raise ConfigError(f"data.path={path} is empty: name a file with text, or use data=sample")
    if path.name.endswith((".gz", ".zst")):
        return [("packed", str(path), 0, size, size)]
    if path.suffix == ".parquet":
        return _row_groups(path, most, data)
    kind = "jsonl" if path.suffix == ".jsonl" else "text"
    count = max(1, round(size / most))
    cuts = [size * i // count for i in range(count + 1)]
    return [(kind, str(path), a, b, b - a) for a, b in pairwise(cuts)]


def decoded(content: bytes, path: str, at: int = 0) -> str:
    """Return ``content`` as text.

    Args:
        content: bytes from the file at ``path``.
        path: for the error message.
        at: position of ``content`` in the file.
    """
    if b"\0" in content:
        zero = at + content.index(b"\0")
        raise ConfigError(f"data.path={path} is a binary file (a zero at byte {zero}): name a UTF-8 text file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={path} is not UTF-8 text (byte {at + error.start}): convert it, for example with "
            f"iconv -f latin1 -t utf-8 {path}"
        ) from None


def extent(item: WorkItem) -> tuple[int, int]:
    """Return the byte range of a part of a text; it begins and ends at line breaks, unless a line is too long."""
    with open(item.path, "rb") as file:
        return _line(file, item.start, MAX_LINE), _line(file, item.stop, MAX_LINE)


def _of_text(item: WorkItem) -> Iterator[Document]:
    start, stop = extent(item)
    with open(item.path, "rb") as file:
        file.seek(start)
        text = decoded(file.read(stop - start), item.path, start)
        if text and not text.isspace():
            yield Document(text, begins=start == 0)
        elif stop - start == os.fstat(file.fileno()).st_size:
            raise ConfigError(f"data.path={item.path} is empty: name a file with text, or use data=sample")


def _line(file: IO[bytes], at: int, most: int | None = None) -> int:
    """Return the start of the first line from ``at`` on; if none starts in ``most`` bytes, of the next character."""
    if at == 0:
        return 0
    file.seek(at - 1)
    position = at - 1
    while chunk := file.readline(min(2**16, most or 2**16)):
        position += len(chunk)
        if chunk.endswith(b"\n"):
            return position
        if most is not None and position - at >= most:
            while 0x80 <= (file.read(1) or b"\0")[0] < 0xC0:  # inside a character
                position += 1
            return position
    return position


def _of_lines(item: WorkItem, data: TextConfig) -> Iterator[str]:
    for line, where in lines(item):
        yield field(line, data.text_key, where)


def lines(item: WorkItem) -> Iterator[tuple[bytes, str]]:
    """Yield the non-empty lines of a .jsonl file, decompressed, and where each is, for messages."""
    number, left = 0, sys.maxsize
    since = f" after byte {item.start:,}" if item.start else ""
    try:
        with _unpacked(item.path) as file:
            if item.kind == "jsonl":
                position = _line(file, item.start)
                left = _line(file, item.stop) - position
                file.seek(position)
            while left > 0 and (line := file.readline()):
                left -= len(line)
                number += 1
                if line.strip():
                    yield line, f"{item.path} (line {number}{since})"
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{item.path} is damaged ({error}, line {number}{since}): copy it again") from None


def _unpacked(path: str) -> Any:
    """Open ``path`` for reading, decompressed."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        pyarrow = optional("pyarrow", path)
        # Unlike zstandard's reader, this one detects truncated files.
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), 2**18)
    return open(path, "rb")


def field(line: bytes, key: str, where: str, option: str = "data.text_key") -> str:
    """Return the text in the field ``key``, which ``option`` names, of a line of JSON."""
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start} of the line): convert the file") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    text = row.get(key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        has = f"the fields {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ConfigError(f"{where} has no text in the field {option}={key}, only {has}")
    return text


def _row_groups(path: Path, most: int, data: TextConfig) -> list[Part]:
    metadata = _parquet(path, data).metadata
    parts, start, size = [], 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= most or group == metadata.num_row_groups - 1:
            parts.append(("parquet", str(path), start, group + 1, size))
            start, size = group + 1, 0
    if not metadata.num_rows:
        raise ConfigError(f"{path} has no rows: leave it out, or name a file with text")
    return parts


def _parquet(path: str | Path, data: TextConfig) -> Any:
    """Open the file at ``path`` and check its column."""
    parquet = optional("pyarrow.parquet", str(path))
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # from pyarrow
        raise ConfigError(f"{path} is a damaged .parquet file ({first_line(error)}): copy it again") from None
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    if kinds.get(data.text_key) not in ("string", "large_string", "string_view"):
        shown = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ConfigError(f"{path} has no text column data.text_key={data.text_key}, only {shown}")
    return file


def _of_rows(item: WorkItem, data: TextConfig) -> Iterator[str | None]:
    file = _parquet(item.path, data)
    try:
        for group in range(item.start, item.stop):
            for batch in file.iter_batches(row_groups=[group], columns=[data.text_key]):
                yield from batch.column(0).to_pylist()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{item.path} is a damaged .parquet file ({first_line(error)}): copy it again") from None
