"""Token shards on disk: files with a header, read together as one array.

Shards have the format of llm.c and modded-nanogpt: 256 little-endian int32 (magic 20240520, version 1, the number of
tokens, zeros), then the tokens as uint16. Vocabularies above 65,536 use llm.c's Llama 3 format: magic 20240801,
version 7, then uint32. nanoGPT's ``train.bin`` and ``val.bin`` (uint16 without a header), Megatron-LM's .bin with its
.idx, and .npy files of any integer type, as written by the Practical MPI course, can be read too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from wordrun.common.errors import ConfigError

HEADER = 256
"""Number of int32 values before the tokens."""
FORMATS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Maps magic and version to the token type."""
SUFFIXES = (".bin", ".npy")
NANOGPT = ("train.bin", "val.bin")
EVIDENCE = 64
"""Minimum number of 16-bit words that show whether tokens without a header have another width."""
MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""The type of tokens by its code in an index of Megatron-LM."""
START, ANSWER = np.uint32(2**31), np.uint32(2**30)
"""Flags in the token ids of pairs: START marks a pair's first token (end-of-text), ANSWER the predicted tokens."""
MACOS = 10_240
"""Number of open files that macOS allows, even if the limit is higher."""
MOST_READ = 2**27
"""Maximum number of tokens per read: the kernel reads less than 2 GiB at once."""


_open_files: weakref.WeakSet[_File] = weakref.WeakSet()
"""All open token files of this process."""
_wanted = 0
"""Total number of files in all ``Tokens`` of this process."""
_lock = threading.Lock()

checksum = xxhash.xxh3_128
"""The digest for shard checksums: as fast as memory, but not cryptographic."""


@dataclass(frozen=True)
class Shard:
    """A token file or a part of one."""

    path: str
    dtype: str
    offset: int
    """Bytes before its first token."""
    count: int
    """Number of tokens."""


def examine(path: str | Path, expected: int | None = None) -> Shard:
    """Return where the tokens of the file at ``path`` are, according to its header and size.

    Args:
        path: a .bin or .npy file.
        expected: the number of tokens in the manifest.

    Raises:
        ConfigError: if it is not a shard or is incomplete.
    """
    path = str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            is_array = path.lower().endswith(".npy")
            shard = _npy(path, file) if is_array else _bin(path, file.read(4 * HEADER), size)
    except OSError as error:
        raise _unreadable(path, error) from None
    needed = shard.offset + shard.count * np.dtype(shard.dtype).itemsize
    if size != needed:
        raise ConfigError(
            f"the shard {path} has {size:,} bytes, but its header says {shard.count:,} tokens, which take {needed:,}: "
            "it was truncated or overwritten; copy or prepare it again"
        )
    if expected is not None and shard.count != expected:
        raise ConfigError(
            f"the shard {path} has {shard.count:,} tokens, but the manifest says {expected:,}: "
            "it does not belong to this dataset; copy or prepare it again"
        )
    return shard


def _bin(path: str, head: bytes, size: int) -> Shard:
    words = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
    dtype = FORMATS.get((int(words[0]), int(words[1]))) if len(words) > 1 else None
    if dtype is not None:
        if len(words) < HEADER:
            raise ConfigError(f"the shard {path} ends within its header: it was truncated; copy or prepare it again")
        return Shard(path, dtype, 4 * HEADER, int(words[2]))
    writer = "Megatron-LM" if (dtype := _megatron(path)) else "nanoGPT"
    dtype = dtype or (_plain(path, head) if os.path.basename(path).lower() in NANOGPT else None)
    if dtype is not None:
        width = np.dtype(dtype).itemsize
        if size % width or not size:
            raise ConfigError(
                f"{path} has {size:,} bytes, but {writer}'s tokens take {width} bytes each: the file was truncated, or "
                "does not hold tokens"
            )
        return Shard(path, dtype, 0, size // width)
    raise ConfigError(
        f"{path} is not a shard: it begins with {words[:2].tolist()} instead of a magic number and version "
        f"({' or '.join(map(str, FORMATS))}), and is not named train.bin or val.bin, as nanoGPT's tokens are"
    )


def _plain(path: str, head: bytes) -> str:
    """Return the type of tokens without a header: 16 bits, as nanoGPT writes, if they are not evidently others.

    Raises:
        ConfigError: they are text or 8-bit tokens.
    """
    content = np.frombuffer(head[: len(head) // 8 * 8], np.uint8)
    short = content.view("<u2")
    if len(short) < EVIDENCE or not short.any():
        return "<u2"
    for dtype in ("<u8", "<u4"):
        # Of 16-bit tokens, every second one would have to be below 16, or to be 0 if all are.
        if content.view(dtype).max() < 2**20 and (short.max() >= 16 or not short[1::2].any()):
            return dtype
    if content.max() < 128 and np.count_nonzero(content[1::2]) > len(short) // 2:
        raise ConfigError(
            f"{path} holds text or 8-bit tokens, but nanoGPT's have 16 bits: read text with data=text, or write the "
            "tokens with tokens.astype(numpy.uint16).tofile(...)"
        )
    return "<u2"


def _megatron(path: str) -> str | None:
    """Return the type of Megatron-LM's tokens, from the index beside them; None: there is none."""
    index = os.path.splitext(path)[0] + ".idx"
    if not os.path.isfile(index):
        return None
    with open(index, "rb") as file:
        head = file.read(18)
    code = head[17] if head.startswith(b"MMIDIDX\0\0") and len(head) == 18 else 0
    if code not in MEGATRON:
        raise ConfigError(f"{index}, beside {path}, is not Megatron-LM's index of integer tokens: copy it again")
    return MEGATRON[code]


def _npy(path: str, file: BinaryIO) -> Shard:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        raise ConfigError(f"{path} is not a valid .npy file ({error}): copy it again") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {dtype} of shape {shape}: tokens should be integers in one dimension")
    return Shard(path, dtype.str, file.tell(), int(shape[0]))


def dtype_for(vocab_size: int, *, flags: bool = False) -> str:
    """Return the token type of shards with ``vocab_size``, and room for ``flags`` in token ids."""
    return "<u4" if flags or vocab_size > 2**16 else "<u2"


def plain(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return ``tokens`` without the flags of pairs."""
    return tokens & (ANSWER - np.uint32(1))


class _File:
    """A file that stays open for reading until it is garbage-collected."""

    def __init__(self, path: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(path, error) from None
        weakref.finalize(self, os.close, self.number)
        _open_files.add(self)


def _will_open(files: int) -> None:
    """Raise the soft limit on open files, if possible, so that ``files`` more can be opened.

    Files should stay open, because opening one is slower than reading a sequence: on a parallel file system a thousand
    times, with a server that all ranks share. The limit is often low for the sake of select(), which neither torch nor
    MPI uses.
    """
    global _wanted
    with _lock:
        _wanted += files
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _wanted + _wanted // 3 + 1  # see _may_open
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            for limit in (wanted, MACOS):
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
                    break


def _may_open() -> float:
    """Return how many token files may be open; a quarter of the limit is left for the rest of the process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else max(1, soft - soft // 4)


class Tokens:
    """The tokens of many shards as one array, with ``len``, slices, and rows from many positions at once.

    ``pread`` copies tokens from the page cache. For rows at random positions this takes a fifth of the time of a memory
    map, which has to map and release pages. Files are opened when first needed and stay open as far as the limit
    allows. Instances can be shared between threads.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = [shard for shard in shards if shard.count]
        self.dtype = np.result_type(*{shard.dtype for shard in self.shards}) if self.shards else np.dtype("<u2")
        self._ends = np.cumsum([shard.count for shard in self.shards], dtype=np.int64).tolist()
        self._locations = []
        """Per shard: its path, the byte offset in it where token 0 of the whole array would be, and its token type."""
        for shard, end in zip(self.shards, self._ends, strict=True):
            dtype = np.dtype(shard.dtype)
            self._locations.append((shard.path, shard.offset - (end - shard.count) * dtype.itemsize, dtype))
        _will_open(len({path for path, _, _ in self._locations}))
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, wanted: slice) -> NDArray[np.integer]:
        """Return a copy of the tokens in a slice without a step."""
        start, stop, step = wanted.indices(len(self))
        assert step == 1
        return self.rows(np.array([start]), max(0, stop - start)).reshape(-1)

    def rows(self, starts: NDArray[np.int64], width: int) -> NDArray[np.integer]:
        """Return ``width`` tokens starting at each of ``starts``, shape (len(starts), width)."""
        out = np.empty((len(starts), width), dtype=self.dtype)
        with self._lock:
            for row, start in zip(out, starts.tolist(), strict=True):
                filled = 0
                while filled < width:  # loops if the row spans several shards
                    position = start + filled
                    number = bisect_right(self._ends, position)
                    path, zero, dtype = self._locations[number]
                    file = self._files.get(path) or self._open(path)
                    count = min(width - filled, self._ends[number] - position, MOST_READ)
                    content = os.pread(file.number, count * dtype.itemsize, zero + position * dtype.itemsize)
                    if len(content) != count * dtype.itemsize:
                        raise ConfigError(
                            f"the shard {path} has been truncated since it was opened: copy or prepare it again"
                        )
                    row[filled : filled + count] = np.frombuffer(content, dtype=dtype)
                    filled += count
        return out

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Return the first ``at`` tokens and the rest; nothing is read."""
        before, after = [], []
        for shard, end in zip(self.shards, self._ends, strict=True):
            kept = min(shard.count, max(0, at - (end - shard.count)))
            rest = shard.offset + kept * np.dtype(shard.dtype).itemsize
            before.append(replace(shard, count=kept))
            after.append(replace(shard, offset=rest, count=shard.count - kept))
        return Tokens(before), Tokens(after)

    def _open(self, path: str) -> _File:
        while self._files and len(_open_files) >= _may_open():
            del self._files[next(iter(self._files))]
        file = self._files[path] = _File(path)
        return file


Array = NDArray[np.integer] | Tokens
"""Tokens in memory or on disk; both support ``len`` and slices."""


def _unreadable(path: str, error: OSError) -> ConfigError:
    remedy = "Raise the limit with ulimit -n" if error.errno == errno.EMFILE else "Prepare the data again"
    return ConfigError(f"the shard {path} cannot be read: {error.strerror}. {remedy}")
