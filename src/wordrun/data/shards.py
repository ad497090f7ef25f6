"""Tokens on disk: files with a header, and one index space over many of them, through memory maps.

A shard is what llm.c and modded-nanogpt read: 256 little-endian int32 (magic 20240520, version 1, the number of
tokens, zeros), then the tokens as uint16. Vocabularies above 65,536 take llm.c's format for Llama 3: magic 20240801,
version 7, then uint32. Also read, as they are: nanoGPT's ``train.bin`` and ``val.bin`` (uint16 and nothing else), and
.npy files of any whole numbers, which the Practical MPI course writes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from wordrun.errors import ConfigError

HEADER = 256
"""int32 numbers before the tokens."""
FORMATS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Magic and version to the type of the tokens."""
SUFFIXES = (".bin", ".npy")
NANOGPT = ("train.bin", "val.bin")
MACOS = 10_240
"""Open files that macOS allows at most, whatever the limit says."""
MAPPED = 8
"""Files that are mapped at once, at most, for each set of tokens."""
FORGET_AFTER = 128
"""Slices after which the pages that they touched are given back. Each may map 64 KiB (the kernel's fault-around)."""


@dataclass(frozen=True)
class Shard:
    """One file, or a part of it."""

    path: str
    dtype: str
    offset: int
    """Bytes before its first token."""
    count: int
    """Tokens."""

    def open(self) -> NDArray[np.integer]:
        """Return its tokens through a memory map.

        Raises:
            ConfigError: the file is gone, or shorter than it was.
        """
        return _mapped(self)[0]


def examine(path: str | Path, expected: int | None = None) -> Shard:
    """Return what the file at ``path`` holds, after its header and its size.

    Args:
        path: a .bin or .npy file.
        expected: number of tokens that somebody else (the manifest) knows it to have.

    Raises:
        ConfigError: it is no shard, or not whole.
    """
    path = str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            shard = _npy(path, file) if path.endswith(".npy") else _bin(path, file.read(4 * HEADER), size)
    except OSError as error:
        raise _unreadable(path, error) from None
    whole = shard.offset + shard.count * np.dtype(shard.dtype).itemsize
    if size != whole:
        raise ConfigError(
            f"the shard {path} has {size:,} bytes, but its header says {shard.count:,} tokens, which take {whole:,}: "
            "it was cut short or overwritten; copy or prepare it again"
        )
    if expected is not None and shard.count != expected:
        raise ConfigError(
            f"the shard {path} has {shard.count:,} tokens, but the manifest says {expected:,}: "
            "it does not belong to this data set; copy or prepare it again"
        )
    return shard


def _bin(path: str, head: bytes, size: int) -> Shard:
    words = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
    dtype = FORMATS.get((int(words[0]), int(words[1]))) if len(words) > 1 else None
    if dtype is not None:
        if len(words) < HEADER:
            raise ConfigError(f"the shard {path} ends within its header: it was cut short; copy or prepare it again")
        return Shard(path, dtype, 4 * HEADER, int(words[2]))
    if os.path.basename(path) in NANOGPT:
        if size % 2 or not size:
            raise ConfigError(
                f"{path} has {size:,} bytes: nanoGPT's tokens have 2 each; it was cut short, or is no file of tokens"
            )
        return Shard(path, "<u2", 0, size // 2)
    raise ConfigError(
        f"{path} is no shard: it begins with {words[:2].tolist()} instead of a magic number and version "
        f"({' or '.join(map(str, FORMATS))}), nor is it called train.bin or val.bin, as nanoGPT's tokens are"
    )


def _npy(path: str, file: BinaryIO) -> Shard:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        raise ConfigError(f"{path} is no .npy file ({error}): copy it again") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {dtype} of shape {shape}: tokens should be whole numbers in one row")
    return Shard(path, dtype.str, file.tell(), int(shape[0]))


def dtype_for(vocab_size: int) -> str:
    """Return the type of the tokens of a vocabulary in a shard."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def checksum() -> xxhash.xxh3_128:
    """Return what a shard's checksum is computed with: XXH3 of 128 bits, which is as fast as memory.

    It finds what disks and networks break. It is no signature.
    """
    return xxhash.xxh3_128()


def _mapped(shard: Shard) -> tuple[NDArray[np.integer], mmap.mmap | None]:
    if shard.count == 0:
        return np.empty(0, dtype=shard.dtype), None
    end = shard.offset + shard.count * np.dtype(shard.dtype).itemsize
    try:
        fd = os.open(shard.path, os.O_RDONLY)
        try:
            if os.fstat(fd).st_size < end:  # touching pages that are not there would end the process by a signal
                raise _cut_short(shard.path)
            pages = mmap.mmap(fd, end, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(shard.path, error) from None
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)  # else the kernel would read 32 pages around each that is wanted
    return np.frombuffer(pages, dtype=shard.dtype, count=shard.count, offset=shard.offset), pages


class _File:
    """A file that is open for reading until it is forgotten, and what is known of all of them."""

    lock = threading.RLock()  # the end of one may be noticed anywhere, also where it is held
    open = 0
    """How many this process has."""
    wanted = 0
    """How many there are to be opened, as far as anybody has said."""

    def __init__(self, path: str) -> None:
        self.number = -1
        try:
            self.number = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(path, error) from None
        with _File.lock:
            _File.open += 1

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            with _File.lock:
                _File.open -= 1


def _will_open(files: int) -> None:
    """Raise the process's limit of open files, as far as it may by itself, so that ``files`` more can be.

    To open a file takes longer than to read a sequence, and on a parallel file system a thousand times as long, on a
    server that all ranks share. The limit is often low for the sake of select(), which neither torch nor MPI uses.
    """
    with _File.lock:
        _File.wanted += files
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _File.wanted + _File.wanted // 3 + 1  # see _may_open
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            for limit in (wanted, MACOS):
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
                    break


def _may_open() -> float:
    """Return how many files may be open for tokens: a quarter of the process's limit is for everybody else."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else max(1, soft - soft // 4)


class Tokens:
    """The tokens of many shards, as if they were one array: ``len``, slices, and rows from many places at once.

    Slices are views of memory maps. Rows are copied by ``pread`` from the same pages of the file system's cache: where
    each row lies elsewhere it takes a fifth of the time, because nothing is mapped that has to be given back again.
    Files are opened when they are first needed and stay open, as far as the process may have them open at once; the
    resident memory stays small however much is read. Threads may share it.
    """

    def __init__(self, shards: Sequence[Shard], most_open: int | None = None) -> None:
        self.shards = [shard for shard in shards if shard.count]
        self.dtype = np.result_type(*{shard.dtype for shard in self.shards}) if self.shards else np.dtype("<u2")
        self._ends = np.cumsum([shard.count for shard in self.shards], dtype=np.int64).tolist()
        self._places = [(shard.path, shard.offset, np.dtype(shard.dtype)) for shard in self.shards]
        self._most = most_open
        _will_open(len({path for path, _, _ in self._places}))
        self._maps: dict[int, tuple[NDArray[np.integer], mmap.mmap | None]] = {}
        self._files: dict[str, _File] = {}
        self._touched: set[int] = set()
        self._slices = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, wanted: slice) -> NDArray[np.integer]:
        """Return the tokens of a slice without a step; within one shard they are not copied."""
        start, stop, step = wanted.indices(len(self))
        assert step == 1
        stop = max(start, stop)
        number = bisect_right(self._ends, start)
        if number < len(self._ends) and stop <= self._ends[number]:
            return self._within(number, start, stop)
        parts = []
        while start < stop:
            end = min(stop, self._ends[number])
            parts.append(self._within(number, start, end))
            start, number = end, number + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def rows(self, starts: NDArray[np.int64], width: int) -> NDArray[np.integer]:
        """Return the ``width`` tokens from each of ``starts`` on, (len(starts), width)."""
        out = np.empty((len(starts), width), dtype=self.dtype)
        with self._lock:
            for row, start in enumerate(starts.tolist()):
                number = bisect_right(self._ends, start)
                end = self._ends[number]
                path, offset, dtype = self._places[number]
                file = self._files.get(path) or self._open(path)
                at = offset + (start - end + self.shards[number].count) * dtype.itemsize
                if width <= end - start:
                    out[row] = _read(file, path, at, width, dtype)
                    continue
                filled = end - start
                out[row, :filled] = _read(file, path, at, filled, dtype)
                while filled < width:  # it goes on in the next shards
                    number += 1
                    path, offset, dtype = self._places[number]
                    file = self._files.get(path) or self._open(path)
                    more = min(width - filled, self.shards[number].count)
                    out[row, filled : filled + more] = _read(file, path, offset, more, dtype)
                    filled += more
        return out

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Return the first ``at`` tokens, and the others; nothing is read."""
        before, after = [], []
        for shard, end in zip(self.shards, self._ends, strict=True):
            kept = min(shard.count, max(0, at - (end - shard.count)))
            rest = shard.offset + kept * np.dtype(shard.dtype).itemsize
            before.append(replace(shard, count=kept))
            after.append(replace(shard, offset=rest, count=shard.count - kept))
        return Tokens(before), Tokens(after)

    def _open(self, path: str) -> _File:
        while self._files and _File.open >= (self._most or _may_open()):
            del self._files[next(iter(self._files))]
        file = self._files[path] = _File(path)
        return file

    def _within(self, number: int, start: int, stop: int) -> NDArray[np.integer]:
        entry = self._maps.get(number) or self._map(number)
        self._touched.add(number)
        self._slices += 1
        if self._slices >= FORGET_AFTER:
            self._forget()
        base = self._ends[number] - self.shards[number].count
        return entry[0][start - base : stop - base]

    def _map(self, number: int) -> tuple[NDArray[np.integer], mmap.mmap | None]:
        while len(self._maps) >= (self._most or MAPPED):  # a map keeps its file open, too
            self._maps.pop(next(iter(self._maps)), None)
        entry = self._maps[number] = _mapped(self.shards[number])
        return entry

    def _forget(self) -> None:
        """Take the pages out of this process; they stay in the file system's cache."""
        touched, self._touched, self._slices = self._touched, set(), 0
        for number in touched:
            pages = self._maps.get(number, (None, None))[1]
            if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
                pages.madvise(mmap.MADV_DONTNEED)


Array = NDArray[np.integer] | Tokens
"""Tokens in memory or on disk, which have a length and slices."""


def _read(file: _File, path: str, at: int, count: int, dtype: np.dtype[Any]) -> NDArray[np.integer]:
    content = os.pread(file.number, count * dtype.itemsize, at)
    if len(content) != count * dtype.itemsize:
        raise _cut_short(path)
    return np.frombuffer(content, dtype=dtype)


def _unreadable(path: str, error: OSError) -> ConfigError:
    if error.errno == errno.EMFILE:
        return ConfigError(f"the shard {path} cannot be read: {error.strerror}. Raise the limit by ulimit -n")
    return ConfigError(f"the shard {path} cannot be read: {error.strerror}. Prepare the data again")


def _cut_short(path: str) -> ConfigError:
    return ConfigError(f"the shard {path} has been cut short since it was opened: copy or prepare it again")
