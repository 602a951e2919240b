"""The file of one chunk: a header with a checksum, then the chunk's bytes."""

from __future__ import annotations

import os
import struct
import threading
import zlib
from pathlib import Path

HEADER = struct.Struct("<8sQI")
"""Magic, number of bytes that follow, CRC-32 of the key and these bytes."""
MAGIC = b"TenutoK1"
UNFINISHED = ".part"
"""How the name of a file ends that is not whole yet."""


class DamagedError(Exception):
    """A file does not hold what it should."""


def write_chunk(path: Path, key: bytes, data: memoryview) -> None:
    """Write a chunk's file; it appears under its name only when it is whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{threading.get_ident()}{UNFINISHED}")
    try:
        with open(unfinished, "wb", buffering=0, opener=_open_private) as file:
            file.write(HEADER.pack(MAGIC, data.nbytes, zlib.crc32(data, zlib.crc32(key))))
            rest = data
            while rest.nbytes:
                rest = rest[file.write(rest) or 0 :]
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _open_private(path: str, flags: int) -> int:
    """KV tells what was in the prompt, so only the server's user may read it."""
    return os.open(path, flags, 0o600)


def read_chunk(path: Path, key: bytes, data: memoryview) -> None:
    """Read a chunk's file into `data`. Raises DamagedError, or OSError."""
    with open(path, "rb", buffering=0) as file:
        header = file.read(HEADER.size) or b""
        if len(header) < HEADER.size:
            raise DamagedError("the header is cut")
        magic, num_bytes, checksum = HEADER.unpack(header)
        if magic != MAGIC or num_bytes != data.nbytes:
            raise DamagedError("the header is another's")
        rest = data
        while rest.nbytes:
            num_read = file.readinto(rest) or 0
            if not num_read:
                raise DamagedError("the file is cut")
            rest = rest[num_read:]
    if zlib.crc32(data, zlib.crc32(key)) != checksum:
        raise DamagedError("the checksum differs")


def try_read_name(name: str) -> bytes | None:
    """The key of the chunk in a file of this name; None for a file of somebody else's."""
    stem, dot, end = name.partition(".")
    try:
        return bytes.fromhex(stem) if dot and end == "kv" else None
    except ValueError:
        return None
