"""Text files: plain text, and rows of JSON, CSV and Parquet, also compressed, read completely or in parts."""

from __future__ import annotations

import csv
import errno
import glob
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

from wordrun.common.errors import ConfigError, first_line
from wordrun.data import contents
from wordrun.data.contents import DAMAGE, FORMATS, UNKNOWN, UNNAMED, Content, opened, optional
from wordrun.data.options import ANSWERED, TextConfig
from wordrun.data.prepare.sources.base import BOM, BadRowError, Document, Source, WorkItem, required

MAX_LINE = 2**20
"""Maximum number of bytes to search for a line break before cutting the text anyway."""
MAX_ROW = 2**27
"""Maximum size of a row in bytes, so that reading one does not use up the memory."""
READ = 2**20
"""Number of characters of a JSON file to read at once."""
SPACE, COMMA = re.compile(r"\s*"), re.compile(r"\s*,?\s*")
Part = tuple[str, str, int, int, int, str]
"""Kind, path, start, stop, size and packing of a work item."""
Row = dict[str, Any] | BadRowError
"""The fields of a row, or what is wrong with it."""


class FileSource(Source):
    """The files given by data.path."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without cached values: the source is sent to every worker."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def files(self) -> list[Path]:
        """Return the file, or the files of known types in the folder or matching the glob, sorted by name.

        Raises:
            ConfigError: if there are none.
        """
        return self._found[0]

    @cached_property
    def _found(self) -> tuple[list[Path], list[str]]:
        """The files, and those that are left out because of their names, each with the reason."""
        path = str(self.path)
        if os.path.isdir(path):
            paths, what = (
                list(contents.below(path)),
                "has no .txt, .md, .jsonl, .json, .csv or .parquet: name a folder with some",
            )
        elif glob.has_magic(path) and not os.path.exists(path):
            paths = [Path(p) for p in glob.glob(path, recursive=True) if not os.path.isdir(p)]
            what = "matches no file: put it in quotes, so that the shell does not expand it, and check the spelling"
        elif os.path.exists(path):
            return [Path(path).absolute()], []
        else:
            paths, what = [], f"cannot be read: {os.strerror(errno.ENOENT)}. Name a text file that you may read"
        if not paths:
            raise ConfigError(f"data.path={path} {what}")
        kept, left_out, seen = [], [], set[str]()
        # Links come last, because their targets may be read under their own names.
        for each in sorted((p.absolute() for p in paths), key=lambda p: (p.is_symlink(), p)):
            named = contents.by_name(each.name)
            fault = named.fault or contents.ELSEWHERE.get(named.type, "")
            if self.data.format and fault in (UNKNOWN, UNNAMED):
                fault = ""
            if each.is_dir():
                fault = "a link to a folder that is read already"
            elif not fault and (real := os.path.realpath(each)) in seen:
                fault = "a link to a file that is read already"
            elif not fault:
                seen.add(real)
            if fault:
                left_out.append(f"{each} ({fault})")
            else:
                kept.append(each)
        if not kept:
            raise ConfigError(self._nothing(left_out))
        return sorted(kept), left_out

    def _nothing(self, left_out: list[str]) -> str:
        more = ". data.format=text reads files of any type as text" * any(UNKNOWN in each for each in left_out)
        return f"data.path={self.path} has no file that can be used: {contents.few(left_out)}{more}"

    @cached_property
    def _contents(self) -> dict[Path, Content]:
        """What each file is, according to its beginning.

        Raises:
            ConfigError: there is only one file, and nothing can be read from it.
        """
        found = {path: contents.by_content(path, self.data.format) for path in self.files()}
        if os.path.isdir(str(self.path)) or len(found) > 1:
            return found
        ((path, content),) = found.items()
        if not content.fault or content.fault == "damaged":  # reading a damaged file gives a better message
            return {path: content if content.type else replace(contents.by_name(path.name), fault="")}
        remedy = {
            "empty": ": name a file with text, or use data=sample",
            UNKNOWN: ": set data.format=text to read it as text, or to the type of its rows: jsonl, json, csv, parquet",
        }.get(content.fault, ": name a UTF-8 text file" if content.fault.startswith(contents.BINARY) else "")
        if content.fault.startswith("cannot be read"):
            raise ConfigError(f"data.path={path} {content.fault}. Name a text file that you may read")
        raise ConfigError(f"data.path={path} is {content.fault}{remedy}")

    def left_out(self) -> list[str]:
        """Return the files that are left out, each with the reason."""
        faults = [f"{path} ({content.fault})" for path, content in self._contents.items() if content.fault]
        return sorted(faults + self._found[1])

    def files_read(self) -> str:
        """Return how many files of which types are read, and for which split if their names divide them."""
        read = contents.described(content.type for content in self._used.values())
        splits = self.splits()
        if not splits:
            return read
        names: dict[str, list[str]] = {"train": [], "val": [], "test": []}
        for path, split in splits.items():
            names[split].append(path.name)
        shown = {split: f"{len(found):,} ({contents.few(found)})" for split, found in names.items()}
        if not names["val"]:
            return f"{read}, divided by their names: for training {shown['train']}, for validation {shown['test']}"
        test = f", and not the test split {shown['test']}" if names["test"] else ""
        return f"{read}, divided by their names: for training {shown['train']}, for validation {shown['val']}{test}"

    def splits(self) -> dict[Path, str]:
        """Return the split of each file if some are for training, and others for validation or test, by their names.

        The name of a folder counts before the names of the files in it. Files whose names have no split are for
        training.

        Raises:
            ConfigError: data.val_fraction is set, too.
        """
        return self._splits

    @cached_property
    def _splits(self) -> dict[Path, str]:
        if len(self.files()) < 2:
            return {}
        paths = [path for path, content in self._contents.items() if not content.fault]
        top = os.path.commonpath([path.parent for path in paths]) if paths else ""
        words = {path: [contents.split_of(part) for part in path.relative_to(top).parts] for path in paths}
        found = {path: next(filter(None, splits), None) for path, splits in words.items()}
        if "train" not in found.values() or not {"val", "test"} & {*found.values()}:
            return {}
        share = self.data.val_fraction
        if share != TextConfig.val_fraction:
            held_out = contents.few([path.name for path, split in found.items() if split in ("val", "test")])
            raise ConfigError(
                f"data.val_fraction={share:g} has no effect, because names in data.path={self.path} give the "
                f"validation split ({held_out}): remove the option, or name only the training files with data.path"
            )
        return {path: split or "train" for path, split in found.items()}

    @property
    def _used(self) -> dict[Path, Content]:
        """The files that are read; the test split is not, unless it is the only one for validation."""
        splits = self.splits()
        unread = "test" if "val" in splits.values() else ""
        return {
            path: content
            for path, content in self._contents.items()
            if not content.fault and not (unread and splits[path] == unread)
        }

    def items(self) -> list[WorkItem]:
        """Return work items of about data.shard_mb each; a file that cannot be divided is a single item."""
        most = self.data.shard_mb * 2**20
        used = self._used
        if not used:
            raise ConfigError(self._nothing(self.left_out()))
        parts = [part for path, content in used.items() for part in _parts(path, content, most, self.data)]
        splits = {str(path): "train" if split == "train" else "val" for path, split in self.splits().items()}
        return [WorkItem(number, *part, splits.get(part[1], "")) for number, part in enumerate(parts)]

    def single_text(self) -> WorkItem | None:
        """Return the work item for the complete file if the source is one plain text file, else None."""
        paths = self.files()
        if len(paths) > 1 or self._contents[paths[0]] != Content("text"):
            return None
        return WorkItem(0, *_parts(paths[0], Content("text"), sys.maxsize, self.data)[0])

    def beginning(self, item: WorkItem, characters: int) -> WorkItem:
        """Return a work item for the first bytes of a text; a UTF-8 character has at most four."""
        if item.kind != "text" or item.packing:
            return item
        start, stop = extent(item)
        return replace(item, start=start, stop=min(stop, start + 4 * characters))

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the texts of ``item``, and a document with a fault for each row without text."""
        if item.kind == "text":
            yield from _of_packed(item, self.data.shard_mb * 2**20) if item.packing else _of_text(item)
            return
        for row, where in rows(item, [self.data.text_key]):
            try:
                yield Document(field(row, self.data.text_key, where))
            except BadRowError as error:
                yield error.as_document()


def _parts(path: Path, content: Content, most: int, data: TextConfig) -> list[Part]:
    """Return the parts of one file, of about ``most`` bytes each."""
    if content.type not in FORMATS:
        raise ConfigError(f"data.path={path} is {contents.ELSEWHERE[content.type]}")
    size = path.stat().st_size
    if content.type == "parquet":
        return _row_groups(path, most, data)
    if content.packing or content.type not in ("text", "jsonl"):
        return [(content.type, str(path), 0, size, size, content.packing)]
    count = max(1, round(size / most))
    cuts = [size * i // count for i in range(count + 1)]
    return [(content.type, str(path), a, b, b - a, "") for a, b in pairwise(cuts)]


def decoded(content: bytes, path: str, at: int = 0) -> str:
    """Return ``content`` as text, without byte-order marks and with line breaks as "\\n".

    Args:
        content: bytes from the file at ``path``.
        path: for the error message.
        at: position of ``content`` in the file.
    """
    if b"\0" in content:
        zero = at + content.index(b"\0")
        raise ConfigError(f"data.path={path} is a binary file (a zero at byte {zero}): name a UTF-8 text file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={path} is not UTF-8 text (byte {at + error.start}): convert it, for example with "
            f"iconv -f latin1 -t utf-8 {path}"
        ) from None
    return text.replace(BOM, "").replace("\r\n", "\n").replace("\r", "\n")


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


def _of_packed(item: WorkItem, most: int) -> Iterator[Document]:
    """Yield a compressed text in parts of about ``most`` bytes."""
    rest, at, begins = b"", 0, True
    try:
        with opened(item.path, item.packing) as file:
            while read := file.read(most):
                content = rest + read + file.readline(MAX_LINE)
                cut = len(content)
                if not content.endswith(b"\n"):  # perhaps within a character, which the next part begins with
                    while cut > 1 and content[cut - 1] & 0xC0 == 0x80:
                        cut -= 1
                    cut -= content[cut - 1] >= 0x80
                if text := decoded(content[:cut], item.path, at):
                    yield Document(text, begins=begins)
                    begins = False
                rest, at = content[cut:], at + cut
    except DAMAGE as error:
        raise ConfigError(f"{item.path} is damaged ({error}): copy it again") from None
    if rest:
        yield Document(decoded(rest, item.path, at), begins=begins)


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


def rows(item: WorkItem, columns: list[str] | None = None) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a file, and where each is, for messages.

    Args:
        item: a part of a file, or all of it.
        columns: the columns of a .parquet file to read, which must contain text; None: all.

    Raises:
        ConfigError: the file is damaged.
    """
    read = {"jsonl": _of_lines, "json": _of_json, "csv": _of_csv}.get(item.kind)
    where = item.path
    try:
        for row, where in read(item) if read else _of_parquet(item, columns):
            yield row, where
    except UnicodeDecodeError as error:
        raise ConfigError(f"{item.path} is not UTF-8 ({error.reason}, after {where}): convert the file") from None
    except DAMAGE as error:
        raise ConfigError(f"{item.path} is damaged ({error}, after {where}): copy it again") from None


def _of_lines(item: WorkItem) -> Iterator[tuple[Row, str]]:
    number, left = 0, sys.maxsize
    since = f" after byte {item.start:,}" if item.start else ""
    with opened(item.path, item.packing) as file:
        if not item.packing:
            position = _line(file, item.start)
            left = _line(file, item.stop) - position
            file.seek(position)
        while left > 0 and (line := file.readline(MAX_ROW)):
            left -= len(line)
            number += 1
            where = f"{item.path} (line {number}{since})"
            if len(line) == MAX_ROW and not line.endswith(b"\n"):
                while (more := file.readline(MAX_LINE)) and not more.endswith(b"\n"):
                    left -= len(more)
                left -= len(more)
                yield BadRowError("too long", f"{where} has more than {MAX_ROW // 2**20} MiB"), where
            elif line.strip():
                yield _parsed(line, where), where


def _parsed(line: bytes, where: str) -> Row:
    """Return the fields of a line of JSON."""
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError as error:
        return BadRowError("not UTF-8", f"{where} is not UTF-8 (byte {error.start} of the line): convert the file")
    except ValueError as error:
        return BadRowError("not JSON", f"{where} is not valid JSON: {error}")
    except RecursionError:
        return BadRowError("nested too deeply", f"{where} is JSON that is nested too deeply")
    return _checked(row, where)


def _checked(row: Any, where: str) -> Row:
    if isinstance(row, dict):
        return row
    return BadRowError("without fields", f"{where} has no fields, only a {type(row).__name__}")


def _of_json(item: WorkItem) -> Iterator[tuple[Row, str]]:
    """Yield the objects of a JSON array, or of a sequence of JSON values without one."""
    decoder = json.JSONDecoder()
    with opened(item.path, item.packing) as binary, io.TextIOWrapper(binary, "utf-8-sig") as file:
        text = file.read(READ)
        at = SPACE.match(text).end()  # type: ignore[union-attr]
        is_array = text[at : at + 1] == "["
        at += is_array
        for number in range(1, sys.maxsize):
            where = f"{item.path} (row {number})"
            while True:
                try:
                    at = COMMA.match(text, at).end()  # type: ignore[union-attr]
                    if is_array and text[at : at + 1] == "]":
                        return
                    row, end = decoder.raw_decode(text, at)
                    break
                except RecursionError:
                    raise ConfigError(f"{where} is JSON that is nested too deeply: leave it out") from None
                except ValueError as error:  # perhaps the rest of the row has not been read
                    more = file.read(max(READ, len(text) - at)) if len(text) - at < MAX_ROW else ""
                    if not more and not is_array and number > 1 and at == len(text):
                        return
                    if not more:
                        raise ConfigError(f"{where} is not valid JSON: {first_line(error)}") from None
                    text, at = text[at:] + more, 0
            yield _checked(row, where), where
            at = end


def _of_csv(item: WorkItem) -> Iterator[tuple[Row, str]]:
    """Yield the rows after the first, which has the names of the columns and shows the separator."""
    csv.field_size_limit(MAX_ROW)
    with (
        opened(item.path, item.packing) as binary,
        io.TextIOWrapper(binary, "utf-8-sig", "surrogateescape", newline="") as file,
    ):
        head = file.readline(MAX_LINE)
        table = csv.reader(chain([head], file), delimiter=max(",\t;|", key=head.count))
        names = next(table)
        while True:
            where = f"{item.path} (line {table.line_num + 1})"
            try:
                cells = next(table)
                ",".join(cells).encode()
            except StopIteration:
                return
            except UnicodeEncodeError:
                yield BadRowError("not UTF-8", f"{where} is not UTF-8: convert the file"), where
            except csv.Error as error:
                yield BadRowError("not CSV", f"{where} is not CSV: {error}"), where
            else:
                if len(cells) == len(names):
                    yield dict(zip(names, cells, strict=True)), where
                elif cells:
                    counts = f"has {len(cells)} columns instead of {len(names)}"
                    yield BadRowError("with other columns", f"{where} {counts}"), where


def field(row: Row, key: str, where: str, option: str = "data.text_key", *, may_be_empty: bool = False) -> str:
    """Return the text in the field ``key`` of a row; ``option`` is the option that sets ``key``.

    Raises:
        BadRowError: there is none.
    """
    if isinstance(row, BadRowError):
        raise row
    text = row.get(key)
    if not isinstance(text, str) and not (text is None and key in row):
        raise BadRowError(
            "without text",
            f"{where} has no text in the field {option}={key}, only the fields {', '.join(map(str, row))}",
        )
    return "" if text == "" and may_be_empty else required(text, where, option[5:-4])


def _row_groups(path: Path, most: int, data: TextConfig) -> list[Part]:
    metadata = _parquet(path, [data.text_key] if data.kind not in ANSWERED else None).metadata
    parts, start, size = [], 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= most or group == metadata.num_row_groups - 1:
            parts.append(("parquet", str(path), start, group + 1, size, ""))
            start, size = group + 1, 0
    if not metadata.num_rows:
        raise ConfigError(f"{path} has no rows: leave it out, or name a file with text")
    return parts


def _parquet(path: str | Path, columns: list[str] | None) -> Any:
    """Open the file at ``path`` and check that the ``columns`` contain text."""
    parquet = optional("pyarrow.parquet", str(path))
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # from pyarrow
        raise ConfigError(f"{path} is a damaged .parquet file ({first_line(error)}): copy it again") from None
    kinds = {field.name: str(field.type).removeprefix("dictionary<values=") for field in file.schema_arrow}
    for column in columns or []:
        if not kinds.get(column, "").startswith(("string", "large_string")):
            shown = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise ConfigError(f"{path} has no text column data.text_key={column}, only {shown}")
    return file


def _of_parquet(item: WorkItem, columns: list[str] | None) -> Iterator[tuple[Row, str]]:
    file = _parquet(item.path, columns)
    number = sum(file.metadata.row_group(group).num_rows for group in range(item.start))
    try:
        for batch in file.iter_batches(row_groups=list(range(item.start, item.stop)), columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{item.path} (row {number})"
    except (ValueError, OSError) as error:
        raise ConfigError(f"{item.path} is a damaged .parquet file ({first_line(error)}): copy it again") from None
