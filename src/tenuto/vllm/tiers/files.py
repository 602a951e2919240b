"""The folders and files of the disk tier: who may use a folder, and the format of a chunk's file.

A chunk's file is a header with a checksum, then the chunk's bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from tenuto.core.errors import ConfigError

HEADER = struct.Struct("<8s16sQI")
"""Magic, digest of the KV's origin, number of bytes after the header, CRC-32 of the key and these bytes."""
MAGIC = b"TenutoK2"
_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.kv(\.[0-9]+\.part)?")
"""Names of our files: the chunk's key, and a suffix while the file is incomplete."""
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Links are not followed, and a pipe or a device under that name does not block the open."""
_FOLDERS = re.compile(r"[\w.-]*-[0-9a-f]{8}-dp[0-9]+-[0-9]+|lost\+found")
"""All that may be in a folder whose mode Tenuto changes: engines' folders, and file systems' own."""


def get_engine_name(model: str, rank: int, number: int) -> str:
    """The name of an engine's folder. `number` distinguishes engines of one model and data-parallel rank."""
    digest = hashlib.blake2b(model.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', model)[-80:]}-{digest}-dp{rank}-{number}"


def prepare_folder(folder: Path) -> None:
    """Make a folder that only its owner can open, or change an existing one so. Raises ConfigError.

    KV reveals the prompts, and a user who can write here can plant KV. A folder of another user is refused.
    So is a folder that other users can open and that has files of another program, because they may need
    these.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"--disk: {str(folder)!r} belongs to another user; name a folder of your own, "
                "such as a new one in it"
            )
        if found.st_mode & 0o077:
            others = sorted(each.name for each in folder.iterdir() if not _FOLDERS.fullmatch(each.name))
            if others:
                raise ConfigError(
                    f"--disk: other users can open {str(folder)!r}, and {others[0]!r} in it is not Tenuto's; "
                    "name a folder for KV only, or run chmod 700 on this one"
                )
            folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--disk: cannot write into {str(folder)!r}: {error}") from error


def make_folder(path: Path) -> None:
    """Make a folder, unless it exists. Raises OSError; also if it is a link or another user's.

    Others may have been able to write here before `prepare_folder`. What they made stays theirs to change.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.lstat().st_uid != os.geteuid():
        raise FileExistsError(f"{path} is a link, or belongs to another user")


class DamagedError(Exception):
    """A file does not hold what it should."""


def write_chunk(path: Path, key: bytes, data: memoryview, origin: bytes) -> None:
    """Write a chunk's file. It appears under its name only when it is complete. Raises OSError.

    `origin`: the digest of what the KV depends on, 16 bytes. The folder above the file's own must exist.
    """
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise FileExistsError(f"{path} is not a plain file")
    make_folder(path.parent)
    unfinished = path.with_name(f"{path.name}.{threading.get_ident()}.part")
    try:
        with _open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            file.write(HEADER.pack(MAGIC, origin, data.nbytes, zlib.crc32(data, zlib.crc32(key))))
            rest = data
            while rest.nbytes:
                rest = rest[file.write(rest) or 0 :]
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _open(path: Path, flags: int) -> FileIO:
    """Open a plain file. KV reveals the prompt, so only the server's user may read it."""
    descriptor = os.open(path, flags | _FLAGS, 0o600)
    if not _is_ours(os.fstat(descriptor)):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file of ours")
    return FileIO(descriptor, "wb" if flags & os.O_WRONLY else "rb")


def _is_ours(found: os.stat_result) -> bool:
    """Whether it is a plain file of the server's user. Anybody can compute a checksum."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def read_chunk(path: Path, key: bytes, data: memoryview, origin: bytes) -> None:
    """Read a chunk's file into `data`. Raises DamagedError, or OSError."""
    with _open(path, os.O_RDONLY) as file:
        header = file.read(HEADER.size) or b""
        if len(header) < HEADER.size:
            raise DamagedError("the header is cut")
        magic, found, num_bytes, checksum = HEADER.unpack(header)
        if magic != MAGIC or num_bytes != data.nbytes:
            raise DamagedError("the header belongs to another file")
        if found != origin:
            raise DamagedError("its KV is of other weights or another configuration")
        rest = data
        while rest.nbytes:
            num_read = file.readinto(rest) or 0
            if not num_read:
                raise DamagedError("the file is cut")
            rest = rest[num_read:]
    if zlib.crc32(data, zlib.crc32(key)) != checksum:
        raise DamagedError("the checksum differs")


def is_chunk(path: Path, num_bytes: int) -> bool:
    """Whether there is a plain file of ours at this path with `num_bytes` bytes, header included."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return _is_ours(found) and found.st_size == num_bytes


def try_read_name(name: str) -> bytes | None:
    """The key of the chunk in a file of this name; None if it is incomplete or not ours."""
    found = _NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found and found[2] is None else None


def remove_chunks(folder: Path) -> None:
    """Remove our files in the subfolders of a folder, and folders that are empty afterwards; nothing else.

    What cannot be read or removed stays.
    """
    for entry, _ in scan(folder):
        with contextlib.suppress(OSError):
            os.unlink(entry.path)
    for each in (*list_folders(folder), folder):
        with contextlib.suppress(OSError):
            each.rmdir()


def scan(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Our files in the subfolders of a folder: plain ones, and those that can be read."""
    for below in list_folders(folder):
        with contextlib.suppress(OSError), os.scandir(below) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name) and _is_ours(found):
                        yield entry, found


def list_folders(folder: Path) -> list[Path]:
    """The subfolders of a folder, without links; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []
