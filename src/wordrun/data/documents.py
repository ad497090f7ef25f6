"""The texts of a source, in pieces that can be read apart from each other.

How a source falls into pieces depends on its files and on data.shard_mb alone, never on the number of ranks. So
ranks and processes can share the pieces out as they like, and what they make together is always the same.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from wordrun.config import DataConfig
from wordrun.data.sample import sample_text
from wordrun.data.sources import Source
from wordrun.errors import ConfigError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""What is looked for in a folder."""
LOOK_FOR_LINE = 2**20
"""Bytes after which a text without line breaks is cut anyway."""


@dataclass(frozen=True)
class Piece:
    """A part of a source that one process reads."""

    number: int
    kind: str
    """text, jsonl, packed (a compressed .jsonl), parquet, hf or sample; of shards to be written anew train or val."""
    path: str = ""
    start: int = 0
    """Bytes; of parquet groups of rows, of hf the part of the stream or the first row, of shards tokens."""
    stop: int = 0
    size: int = 0
    """Bytes to be read, as far as they are known: for the order in which pieces are dealt out."""


@dataclass(frozen=True)
class Document:
    """A text, or a part of it that is too long for one piece."""

    text: str
    begins: bool = True
    """Whether it is the beginning."""


def files(path: str) -> list[Path]:
    """Return the files that ``path`` means, in order of their names: one file, those in a folder, or of a glob.

    Raises:
        ConfigError: there are none.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        found = [p for p in Path(path).rglob("*") if p.name.endswith(SUFFIXES) and p.is_file()]
        what = f"has no {', '.join(SUFFIXES)}: name a folder with some"
    elif glob.has_magic(path) and not os.path.exists(path):
        found = [Path(p) for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        what = "matches no file: put it into quotes, so that the shell leaves it alone, and look for a slip"
    else:
        return [Path(path).absolute()]
    if not found:
        raise ConfigError(f"data.path={path} {what}")
    return sorted(p.absolute() for p in found)


def pieces(data: DataConfig, source: Source) -> list[Piece]:
    """Return the pieces of ``source``; of its files only names, sizes and tables of contents are read."""
    if source.path is None and data.kind != "hf":
        return [Piece(0, "sample", size=len(sample_text()))]
    if data.kind == "hf":
        from wordrun.data import hub

        parts = hub.pieces(data)
    elif data.kind == "shards":
        from wordrun.data import opening

        parts = opening.pieces(data)
    else:
        assert source.path is not None
        parts = [part for path in files(source.path) for part in _parts(path, data.shard_mb * 2**20, data)]
    return [Piece(number, *part) for number, part in enumerate(parts)]


def _parts(path: Path, most: int, data: DataConfig) -> list[tuple[str, str, int, int, int]]:
    """Return kind, path, start, stop and size of the pieces of one file."""
    try:
        size = path.stat().st_size
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"data.path={path} cannot be read: {error.strerror}. Name a text file that you may read"
        ) from None
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


def documents(piece: Piece, data: DataConfig) -> Iterator[Document]:
    """Yield the texts of ``piece``; empty ones are left out.

    Raises:
        ConfigError: the file is damaged, binary, not in UTF-8, or lacks the field.
    """
    if piece.kind == "sample":
        yield Document(sample_text())
    elif piece.kind == "text":
        yield from _of_text(piece)
    else:
        if piece.kind == "hf":
            from wordrun.data import hub

            texts = hub.texts(piece, data)
        else:
            texts = _of_rows(piece, data) if piece.kind == "parquet" else _of_lines(piece, data)
        for text in texts:
            if text:
                # JSON may hold halves of characters ("\ud800"), which no encoding can write.
                yield Document(text if text.isascii() else text.encode("utf-8", "replace").decode())


def decoded(content: bytes, path: str, at: int = 0) -> str:
    """Return ``content`` as text.

    Args:
        content: bytes of the file at ``path``.
        path: for the message.
        at: where in the file they begin.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if b"\0" in content[:4096]:
            raise ConfigError(f"data.path={path} is a binary file: name a text in UTF-8") from None
        raise ConfigError(
            f"data.path={path} is not UTF-8 text (byte {at + error.start}): convert it, for example by "
            f"iconv -f latin1 -t utf-8 {path}"
        ) from None
    if "\0" in text:
        where = at + len(text[: text.index("\0")].encode())
        raise ConfigError(f"data.path={path} is a binary file (a zero at byte {where}): name a text in UTF-8")
    return text


def extent(piece: Piece) -> tuple[int, int]:
    """Return where the piece of a text begins and ends, in bytes: with whole lines, if they are not too long."""
    with open(piece.path, "rb") as file:
        return _line(file, piece.start, LOOK_FOR_LINE), _line(file, piece.stop, LOOK_FOR_LINE)


def _of_text(piece: Piece) -> Iterator[Document]:
    start, stop = extent(piece)
    with open(piece.path, "rb") as file:
        file.seek(start)
        text = decoded(file.read(stop - start), piece.path, start)
        if text and not text.isspace():
            yield Document(text, begins=start == 0)
        elif stop - start == os.fstat(file.fileno()).st_size:
            raise ConfigError(f"data.path={piece.path} is empty: name a file with text, or use data=sample")


def _line(file: IO[bytes], at: int, most: int | None = None) -> int:
    """Return where the first line at or after ``at`` begins; after ``most`` bytes without a line, a character."""
    if at == 0:
        return 0
    file.seek(at - 1)
    seen = at - 1
    while chunk := file.readline(min(2**16, most or 2**16)):
        seen += len(chunk)
        if chunk.endswith(b"\n"):
            return seen
        if most is not None and seen - at >= most:
            while 0x80 <= (file.read(1) or b"\0")[0] < 0xC0:  # within a character
                seen += 1
            return seen
    return seen


def _of_lines(piece: Piece, data: DataConfig) -> Iterator[str]:
    number = 0
    try:
        with _unpacked(piece.path) as file:
            if piece.kind == "jsonl":
                position, stop = _line(file, piece.start), _line(file, piece.stop)
                file.seek(position)
            for line in file if piece.kind == "packed" else _until(file, stop - position):
                number += 1
                if line.strip():
                    yield _field(line, data.text_key, f"{piece.path} ({_place(piece, number)})")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{piece.path} is a broken .gz ({error}, {_place(piece, number)}): copy it again") from None
    except OSError as error:
        raise ConfigError(f"{piece.path} is broken ({error}, {_place(piece, number)}): copy it again") from None


def _until(file: IO[bytes], left: int) -> Iterator[bytes]:
    while left > 0 and (line := file.readline()):
        left -= len(line)
        yield line


def _place(piece: Piece, number: int) -> str:
    return f"line {number}" if piece.start == 0 else f"line {number} after byte {piece.start:,}"


def _unpacked(path: str) -> Any:
    """Open ``path`` for reading what is packed in it."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        try:
            import pyarrow
        except ImportError:
            raise ConfigError(f"{path} needs pyarrow: pip install 'wordrun[hf]'") from None
        # Unlike zstandard's own, this reader tells a file that was cut short from one that ends.
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), 2**18)
    return open(path, "rb")


def _field(line: bytes, key: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start} of the line): convert the file") from None
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    text = row.get(key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        has = f"the fields {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ConfigError(f"{where} has no text in the field data.text_key={key}, but {has}")
    return text


def _row_groups(path: Path, most: int, data: DataConfig) -> list[tuple[str, str, int, int, int]]:
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


def _parquet(path: str | Path, data: DataConfig) -> Any:
    """Return the open file at ``path``, whose column is known to be there."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow: pip install 'wordrun[hf]'") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is a broken .parquet ({reason}): copy it again") from None
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    if kinds.get(data.text_key) not in ("string", "large_string", "string_view"):
        shown = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ConfigError(f"{path} has no column of text called data.text_key={data.text_key}, but {shown}")
    return file


def _of_rows(piece: Piece, data: DataConfig) -> Iterator[str]:
    file = _parquet(piece.path, data)
    import pyarrow

    try:
        for group in range(piece.start, piece.stop):
            for batch in file.iter_batches(row_groups=[group], columns=[data.text_key]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{piece.path} is a broken .parquet ({reason}): copy it again") from None
