"""Reading the files: line by line, every error with its file and line, progress for what takes long."""

from __future__ import annotations

import gzip
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tenuto.core.errors import DataError
from tenuto.records.strict_fields import Record

Say = Callable[[str], None]
Note = Callable[[str], None]

_GZIP_MAGIC = b"\x1f\x8b"
_QUIET_S = 2.0
"""What is read faster needs no progress."""
_LINES_PER_LOOK = 20_000
_HEADER = b'{"step":0,"kind":"header"'
_MAX_HEAD_BYTES = 2**20
"""A first line longer than that is no line of a trace, but a whole file in one line."""


def say_on_stderr(text: str) -> None:
    """Progress, away from the result."""
    print(f"[analyze] {text}", file=sys.stderr, flush=True)


def read_lines(path: Path, say: Say, note: Note) -> Iterator[Record]:
    """The objects of a JSONL file, plain or gzip, one at a time.

    A last line that was cut (a killed writer) is left out, and `note` told. Raises DataError for all else.
    """
    progress = _Progress(path, say)
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                progress.look(number, file)
                if not line.strip():
                    continue
                for part in _split_at_restart(line, path, number, note):
                    # A file of one line is no file that was cut behind its last whole line.
                    is_cut = number > 1 and not line.endswith(b"\n")
                    value = _parse(part, f"{path}:{number}", is_last=is_cut, note=note)
                    if value is not None:
                        yield Record(f"{path}:{number}", value)
    except (EOFError, zlib.error) as error:
        note(f"{path}: the compressed file is cut after line {number}: {error}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_head(path: Path) -> tuple[dict[str, Any] | None, bool]:
    """The first line's object, None if the line is no whole object; and whether it is all there is.

    Raises DataError if the file cannot be read or is empty.
    """
    try:
        with _open(path) as file:
            first = next(
                (line for line in iter(partial(file.readline, _MAX_HEAD_BYTES), b"") if line.strip()), b""
            )
            is_alone = not file.readline(_MAX_HEAD_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not first:
        raise DataError(f"{path}: is empty")
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return None, False
    return (value if isinstance(value, dict) else None), is_alone


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP_MAGIC
    return gzip.open(path) if is_packed else path.open("rb")  # type: ignore[return-value]


def _split_at_restart(line: bytes, path: Path, number: int, note: Note) -> list[bytes]:
    """A server that was killed and started again appends its header to the line that was cut."""
    at = line.find(_HEADER, 1)
    if at < 0:
        return [line]
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        note(f"{path}:{number}: cut when the server before was killed; left out")
        return [line[at:]]
    return [line]


def _parse(line: bytes, place: str, *, is_last: bool, note: Note) -> dict[str, Any] | None:
    try:
        value = _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        if is_last:
            note(f"{place}: the last line is cut; left out")
            return None
        raise DataError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{place}: must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class _Progress:
    """Says how far a long file is, every two seconds."""

    def __init__(self, path: Path, say: Say) -> None:
        self._path = path
        self._say = say
        self._next_s = time.monotonic() + _QUIET_S

    def look(self, number: int, file: BinaryIO) -> None:
        """A line was read."""
        if number % _LINES_PER_LOOK or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _QUIET_S
        raw = getattr(file, "fileobj", None) or file
        size = self._path.stat().st_size
        share = f", {raw.tell() / size:.0%}" if size else ""
        self._say(f"{self._path}: {number:,} lines{share}")
