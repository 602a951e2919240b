"""Reading trace files: bytes to JSON objects whose fields are checked one by one.

Every error is a DataError that names the file, the line or JSON path, and the field. A file is read whole
before its first record is used, so nothing is ever half read.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import Counter
from pathlib import Path

from tenuto.core.errors import DataError

MAX_FILE_BYTES = 2**30
"""Largest file after unpacking; the largest public trace in one file is 570 MB. Stops a gzip bomb."""
MAX_TOKENS = 2**24
"""Longest prompt or output; the longest context a public model claims is 10 million tokens."""
MAX_SECONDS = 1e9
"""Longest time, 31 years; up to here a float still tells microseconds apart."""

_GZIP_MAGIC = b"\x1f\x8b"


class Record:
    """One JSON object of a trace, its place in the file known, its fields checked as they are asked for."""

    __slots__ = ("_path", "place", "values")

    def __init__(self, place: str, values: dict[str, object], path: str = "") -> None:
        self.place = place
        """File, and line where there is one."""
        self.values = values
        self._path = path

    def error(self, field: str, problem: str) -> DataError:
        """The error to raise about a field."""
        return DataError(f"{self.place}: {self._path}{field}: {problem}")

    def __contains__(self, field: str) -> bool:
        """Whether a field is there and not null."""
        return self.values.get(field) is not None

    def text(self, field: str) -> str:
        """A string that is not empty."""
        value = self._get(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, f"must be a string that is not empty, got {_show(value)}")
        return value

    def optional_text(self, field: str) -> str | None:
        """A string that is not empty, or None if the field is missing or null."""
        return self.text(field) if field in self else None

    def integer(self, field: str, low: int, high: int = MAX_TOKENS) -> int:
        """A whole number from `low` to `high`; neither a bool nor a float."""
        value = self._get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.error(field, f"must be a whole number from {low} to {high}, got {_show(value)}")
        return value

    def number(self, field: str, high: float = MAX_SECONDS) -> float:
        """A number from 0 to `high`; not a bool."""
        value = self._get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
            raise self.error(field, f"must be a number from 0 to {high:g}, got {_show(value)}")
        return float(value)

    def milliseconds(self, field: str) -> float:
        """A number of milliseconds, as the float nearest to its seconds."""
        value = self.number(field, MAX_SECONDS * 1000)
        written = getattr(self.values[field], "text", str(self.values[field]))
        # Dividing would round a second time; a moved decimal point does not.
        return value / 1000 if "e" in written.lower() else float(f"{written}e-3")

    def hash_ids(self, field: str, num_blocks: int) -> list[int]:
        """`num_blocks` block ids, whole numbers of 0 or more."""
        value = self._get(field)
        if not isinstance(value, list):
            raise self.error(field, f"must be a list of block ids, got {_show(value)}")
        for index, block_id in enumerate(value):
            if type(block_id) is not int or block_id < 0:
                raise self.error(f"{field}[{index}]", f"must be a whole number, got {_show(block_id)}")
        if len(value) != num_blocks:
            raise self.error(
                field, f"{num_blocks} blocks are needed for the prompt's length, got {len(value)}"
            )
        return value

    def records(self, field: str) -> list[Record]:
        """A list of objects, each a record that knows its path."""
        value = self._get(field)
        if not isinstance(value, list):
            raise self.error(field, f"must be a list of objects, got {_show(value)}")
        found = []
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                raise self.error(f"{field}[{index}]", f"must be an object, got {_show(item)}")
            found.append(Record(self.place, item, f"{self._path}{field}[{index}]."))
        return found

    def _get(self, field: str) -> object:
        if field not in self.values:
            raise self.error(field, "is missing")
        return self.values[field]


def read_records(path: Path) -> list[Record]:
    """All records of a file, plain or gzip: JSONL, or one JSON object over any number of lines.

    Raises DataError if the file cannot be read, unpacked, decoded (UTF-8) or parsed, holds anything but
    objects, or holds nothing.
    """
    text = _read_text(path)
    # Only "\n" ends a line: other Unicode line ends may stand inside a JSON string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{path}: is empty")
    if len(lines) > 1 and not _is_json(lines[0][1]):
        return [_parse_record(text, str(path))]
    return [_parse_record(line, f"{path}:{number}") for number, line in lines]


def _parse_record(text: str, place: str) -> Record:
    try:
        value = json.loads(
            text, parse_float=_parse_float, parse_constant=_refuse_constant, object_pairs_hook=_make_object
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{place}: must be a JSON object, got {_show(value)}")
    return Record(place, value)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if data.startswith(_GZIP_MAGIC):
            with gzip.open(path) as unpacked:
                data = unpacked.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{path}: holds more than {MAX_FILE_BYTES} bytes; split it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8: {error.reason}") from None


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class _Float(float):
    """A number with the digits it was written with."""

    text: str


def _parse_float(text: str) -> float:
    value = _Float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    value.text = text
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {counts.most_common(1)[0][0]!r} appears twice")
    return values


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
