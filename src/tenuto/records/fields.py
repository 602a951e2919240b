"""Input files as JSON objects whose fields are checked one by one.

Every error is a DataError that names the file, the line or the place in the JSON, and the field. All fields
are optional, and what is not a finite number counts as missing: a run that measured nothing says null or NaN.
Unknown fields are ignored.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from pathlib import Path

from tenuto.core.errors import DataError

MAX_FILE_BYTES = 2**30
"""Largest input file."""
MAX_NUMBER = 1e15
"""Largest number that is believed; beyond it neither sums nor axes are exact."""

_GZIP_MAGIC = b"\x1f\x8b"
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff]+"
)


def clean(text: str) -> str:
    """A text from outside as it can be printed: no control, direction or surrogate characters."""
    return _UNPRINTABLE.sub(" ", text).strip()


class Fields:
    """One JSON object of an input file, its place known, its fields checked as they are asked for."""

    __slots__ = ("place", "values")

    def __init__(self, place: str, values: dict[str, object]) -> None:
        self.place = place
        """File, and line or index where there is one."""
        self.values = values

    def error(self, field: str, wanted: str) -> DataError:
        """The error to raise about a field."""
        return DataError(f"{self.place}: {field}: must be {wanted}, got {_show(self.values.get(field))}")

    def text(self, field: str) -> str | None:
        """A string, fit to print; None where it is missing, null or blank."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            raise self.error(field, "a string")
        return clean(value) or None if value else None

    def flag(self, field: str) -> bool | None:
        """True or false."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def number(self, field: str) -> float | None:
        """A number of 0 or more; None where it is missing, null or not finite."""
        value = self.values.get(field)
        if not _is_number(value):
            raise self.error(field, f"a number from 0 to {MAX_NUMBER:g}")
        return _to_number(value)

    def integer(self, field: str) -> int | None:
        """A whole number of 0 or more."""
        value = self.number(field)
        if value is not None and value != int(value):
            raise self.error(field, "a whole number")
        return None if value is None else int(value)

    def numbers(self, field: str) -> tuple[float, ...]:
        """A list of numbers of 0 or more; those that are missing are left out."""
        value = self.values.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self.error(field, f"a list of numbers from 0 to {MAX_NUMBER:g}")
        return tuple(number for number in map(_to_number, value) if number is not None)

    def by_turn(self, field: str) -> dict[int, float]:
        """Numbers of 0 or more by turn, `{"1": 3.5, …}`, in the turns' order; turns count from 1."""
        value = self.part(field).values
        if not all(re.fullmatch("[1-9][0-9]{0,8}", key) and _is_number(each) for key, each in value.items()):
            raise self.error(field, 'an object of numbers by turn, {"1": …, "2": …}')
        numbers = {int(key): _to_number(each) for key, each in value.items()}
        return {turn: numbers[turn] for turn in sorted(numbers) if numbers[turn] is not None}  # type: ignore[misc]

    def part(self, field: str) -> Fields:
        """An object; an empty one where it is missing or null."""
        value = self.values.get(field)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(field, "an object")
        return Fields(f"{self.place}: {field}", value)


def read_objects(path: Path, notes: list[str]) -> list[Fields]:
    """All objects of a file, plain or gzip: JSONL, one JSON object, or a list of them.

    A last line that was cut (a killed writer, a full disk) is left out and noted. Raises DataError if the
    file cannot be read, is not UTF-8 or not JSON, or holds anything but objects.
    """
    text = _read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if not lines:
            raise DataError(f"{path}: is empty") from None
        if len(lines) > 1 and _is_json(lines[0][1]):
            number, last = lines[-1]
            if not text.endswith("\n") and not _is_json(last):
                notes.append(f"{clean(str(path))}:{number}: the last line is cut; it was left out.")
                del lines[-1]
            return [_parse_line(line, f"{path}:{number}") for number, line in lines]
        place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        raise DataError(f"{place}: not valid JSON: {_explain(error)}") from None
    if isinstance(value, list):
        return [_make_fields(each, f"{path}[{index}]") for index, each in enumerate(value)]
    return [_make_fields(value, f"{path}:1" if path.suffix == ".jsonl" else str(path))]


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path}: holds more than {MAX_FILE_BYTES} bytes; split it")
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            with gzip.open(path) as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise DataError(f"{path}: holds more than {MAX_FILE_BYTES} bytes unpacked; split it")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8: {error.reason}") from None


def _parse_line(line: str, place: str) -> Fields:
    try:
        return _make_fields(json.loads(line), place)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON: {_explain(error)}") from None


def _make_fields(value: object, place: str) -> Fields:
    if not isinstance(value, dict):
        raise DataError(f"{place}: must be a JSON object, got {_show(value)}")
    return Fields(place, value)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _explain(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error) or type(error).__name__


def _is_number(value: object) -> bool:
    """Whether it is null, a float that is no number, or a number in range."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def _to_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _show(value: object) -> str:
    shown = clean(repr(value))
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
