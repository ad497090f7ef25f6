"""Checksums of a checkpoint's files. Nothing here needs torch.

A file of shards has its checksums in its header, so that no other file has to list them. The header's metadata contain
the CRC-32 of each tensor's bytes, and that of the header itself, computed with zeros in its place. The manifest has the
checksums of all other files.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

UNSEALED = "0000000000"
SEAL = re.compile(rb'"crc32":"(\d{10})"')
CHUNK = 2**26
"""Bytes per checksum of ``of_chunks``: a large file is verified without loading it into memory."""
READ = 2**20
"""Bytes per read of a tensor: they stay in the processor's cache until their checksum is computed."""


def of_chunks(path: Path) -> list[int]:
    """Return the CRC-32 of each ``CHUNK`` bytes of a file."""
    found: list[int] = []
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(CHUNK, max(1, os.fstat(file.fileno()).st_size))))
        while True:
            length = 0
            while length < len(buffer) and (n := file.readinto(buffer[length:])):
                length += n
            if not length:
                return found
            found.append(zlib.crc32(buffer[:length]))


def seal(path: Path) -> None:
    """Write the header's checksum into ``path``, whose metadata have ``UNSEALED`` as crc32."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        (found,) = SEAL.finditer(header)
        file.seek(8 + found.start(1))
        file.write(f"{zlib.crc32(header):010d}".encode())


def problem(path: Path, *, content: bool = True) -> str:
    """Return what is wrong with a sealed file, or an empty string.

    Args:
        path: the file.
        content: read all of it; else only the header, and compare the file's size with it.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, size))
            sums = [int(each) for each in SEAL.findall(text)]
            if sums != [zlib.crc32(SEAL.sub(b'"crc32":"%s"' % UNSEALED.encode(), text))]:
                return f"{path.name}: its header does not match its checksum"
            header = json.loads(text)
            described = json.loads(header.pop("__metadata__")["shards"])
            end = 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0)
            if end != size:
                return f"{path.name} has {size:,} bytes, not {end:,}"
            for name, facts in header.items() if content else ():
                if _sum(file, 8 + length, *facts["data_offsets"]) != described[name]["crc32"]:
                    return f"{path.name}: {name} does not match its checksum"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{path.name}: {error}"
    return ""


def _sum(file: Any, base: int, begin: int, end: int) -> int:
    """Return the CRC-32 of the bytes from ``begin`` to ``end``, counted from ``base``."""
    file.seek(base + begin)
    found, left, buffer = 0, end - begin, memoryview(bytearray(min(READ, end - begin)))
    while left and (n := file.readinto(buffer[: min(left, READ)])):
        found, left = zlib.crc32(buffer[:n], found), left - n
    return found
