"""Reads one JSON object of a file, field by field, and writes the dataclasses of a schema.

`Fields` checks each field that is read. Every error is a DataError that names the file, the line, the field
and the expected value. `read` and `write` follow from a dataclass: its annotations are the one declaration of
each field. A field is a `str`, `bool`, `int`, `float` or `Any`, a `Literal` of texts, another dataclass, a
`Mapping[str, X]` or a `tuple[X, ...]`. A field with a default, or of type `X | None`, may be missing in a
file, null or not finite. An object whose fields are all null or not finite counts as missing. Unknown fields
of a file are ignored.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain, islice
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from tenuto.core.errors import DataError, clean

T = TypeVar("T")

MAX_TOKENS = 2**24
"""Longest prompt or output in tokens. The longest context that a public model claims is 10 million tokens."""
MAX_SECONDS = 1e9
"""Longest time in seconds: 31 years. Up to this value, a float still distinguishes microseconds."""
MAX_COUNT = 2**53
"""Largest sum of tokens. Up to this value, all JSON readers represent integers exactly."""

MAX_DEPTH = 32
"""Levels of lists and objects in a value that is passed on as it is. Pickle and our writers fail at some
hundreds."""

MAX_VALUES = 1_000_000
"""Most values of one level. More count as too deep, because the engine waits while they are looked at. A
prompt of ten million tokens has 625,000 blocks."""

_CONTAINERS = frozenset({dict, list, tuple})
_SHOWN_CHARS = 60


def is_deep(value: Any) -> bool:
    """Whether it has over `MAX_DEPTH` levels of lists and objects, or a level of over `MAX_VALUES` values."""
    level = [value]
    for _ in range(MAX_DEPTH):
        # Mostly in C, because a client can send millions of values, and the engine waits.
        if _CONTAINERS.isdisjoint(map(type, level)):
            return False
        containers = [each for each in level if type(each) in _CONTAINERS]
        values = chain.from_iterable(each.values() if type(each) is dict else each for each in containers)
        level = [*islice(values, MAX_VALUES + 1)]
        if len(level) > MAX_VALUES:
            return True
    return not _CONTAINERS.isdisjoint(map(type, level))


class Fields:
    """One JSON object and its place in a file, with readers for its fields.

    Each reader raises DataError if the field is missing or holds something else. For a field that may be
    missing, null or NaN: `fields.optional(fields.number, "jps")`.
    """

    __slots__ = ("_path", "place", "values")

    def __init__(self, place: str, values: dict[str, object], path: str = "") -> None:
        self.place = place
        """The file, with the line or index if there is one."""
        self.values = values
        self._path = path

    @property
    def file(self) -> str:
        """The file, without the line or index."""
        return re.sub(r"(:\d+|\[\d+\])\Z", "", self.place)

    def error(self, field: str, problem: str) -> DataError:
        """Make the error to raise about a field."""
        return DataError(f"{self.place}: {self._path}{field}: {problem}")

    def __contains__(self, field: str) -> bool:
        """Whether a field exists and is neither null, NaN nor infinite."""
        value = self.values.get(field)
        return value is not None and not (isinstance(value, float) and not math.isfinite(value))

    def optional(self, read: Callable[[str], T], field: str) -> T | None:
        """Read a field with the reader `read`. None if the field is missing or null."""
        return read(field) if field in self else None

    def text(self, field: str) -> str:
        """Read a non-empty string."""
        value = self._get(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, f"must be a string that is not empty, got {show(value)}")
        return value

    def anything(self, field: str) -> object:
        """Read a value to be written again as it is."""
        if is_deep(self.values[field]):
            limits = f"{MAX_DEPTH} levels of lists and objects, and {MAX_VALUES:,} values on a level"
            raise self.error(field, f"must have at most {limits}")
        return self.values[field]

    def string(self, field: str) -> str:
        """Read a string, which may be empty."""
        return self._get_typed(field, str, "a string")

    def flag(self, field: str) -> bool:
        """Read a boolean."""
        return self._get_typed(field, bool, "true or false")

    def integer(self, field: str, low: int = 0, high: int = MAX_TOKENS) -> int:
        """Read an integer from `low` to `high`; a bool or float is an error."""
        value = self._get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.error(field, f"must be a whole number from {low} to {high}, got {show(value)}")
        return value

    def count(self, field: str) -> int:
        """Read a sum over a whole run: an integer of at least 0."""
        return self.integer(field, 0, MAX_COUNT)

    def number(self, field: str, high: float = MAX_SECONDS, low: float = 0.0) -> float:
        """Read a number from `low` to `high`; a bool is an error."""
        value = self._get(field)
        if not is_number(value, high, low):
            raise self.error(field, f"must be a number from {low:g} to {high:g}, got {show(value)}")
        return float(value)

    def milliseconds(self, field: str) -> float:
        """Read milliseconds and return the float that is nearest to the value in seconds."""
        value = self.number(field, MAX_SECONDS * 1000)
        written = getattr(self.values[field], "text", str(self.values[field]))
        # A division would round a second time. Moving the decimal point does not.
        return value / 1000 if "e" in written.lower() else float(f"{written}e-3")

    def numbers(self, field: str) -> tuple[float, ...]:
        """Read a list of numbers from 0 to `MAX_SECONDS`; nulls are left out."""
        value = self._get(field)
        if not isinstance(value, list) or not all(
            each is None or is_number(each, MAX_SECONDS) for each in value
        ):
            raise self.error(field, f"must be a list of numbers from 0 to {MAX_SECONDS:g}, got {show(value)}")
        return tuple(float(each) for each in value if each is not None)

    def integers(self, field: str) -> list[int]:
        """Read a list of integers of at least 0."""
        value = self._get_typed(field, list, "a list of whole numbers")
        # A trace has millions of these: this test takes half the time of a loop over them.
        if set(map(type, value)) <= {int} and min(value, default=0) >= 0:
            return value
        index, each = next((n, each) for n, each in enumerate(value) if type(each) is not int or each < 0)
        raise self.error(f"{field}[{index}]", f"must be a whole number, got {show(each)}")

    def contents(self, field: str) -> list[tuple[str, int]]:
        """Read what a prompt holds: pairs of a content's id and its tokens."""
        value = self._get(field)
        pairs: list[tuple[str, int]] = []
        for index, pair in enumerate(value if isinstance(value, list) else [value]):
            match pair:
                case [str(content_id), int(length)] if type(length) is int and 0 < length <= MAX_TOKENS:
                    pairs.append((content_id, length))
                case _:
                    problem = f"must be a pair of content id and tokens (1 to {MAX_TOKENS})"
                    raise self.error(f"{field}[{index}]", problem)
        return pairs

    def part(self, field: str) -> Fields:
        """Read an object."""
        value = self._get_typed(field, dict, "an object")
        return Fields(self.place, value, f"{self._path}{field}.")

    def optional_part(self, field: str) -> Fields:
        """Read an object; an empty one if the field is missing or null."""
        return self.optional(self.part, field) or Fields(self.place, {}, f"{self._path}{field}.")

    def items(self, field: str) -> Fields:
        """Read a list. Its items are fields of the result: `FIELD[0]`, `FIELD[1]` and so on."""
        value = self._get_typed(field, list, "a list")
        named = {f"{field}[{number}]": each for number, each in enumerate(value)}
        return Fields(self.place, named, self._path)

    def records(self, field: str) -> list[Fields]:
        """Read a list of objects."""
        items = self.items(field)
        return [items.part(each) for each in items.values]

    def _get(self, field: str) -> object:
        if field not in self.values:
            raise self.error(field, "is missing")
        return self.values[field]

    def _get_typed(self, field: str, kind: type[T], wanted: str) -> T:
        value = self._get(field)
        if not isinstance(value, kind):
            raise self.error(field, f"must be {wanted}, got {show(value)}")
        return value


def show(value: object) -> str:
    """Format a value for an error message: short and on one line."""
    shown = clean(repr(value))
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[: _SHOWN_CHARS - 3]}..."


def is_number(value: object, high: float = MAX_COUNT, low: float = 0.0) -> TypeGuard[float]:
    """Whether it is a number from `low` to `high`; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high and (isinstance(value, int) or math.isfinite(value))


Read = Callable[[Fields, str], Any]
"""Reads one field of an object. Raises DataError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The bounds of a number, both included: `Annotated[int, Range(1, 9)]`."""

    low: float
    high: float


COUNT, SECONDS = Range(0, MAX_COUNT), Range(0, MAX_SECONDS)
"""The bounds of an `int` and of a `float` that have no others."""


class LeftOut:
    """`Annotated[X | None, LeftOut]`: None is not written. In other fields, None is written as null."""


def read(cls: Callable[..., T], fields: Fields) -> T:
    """Read a dataclass from an object. Raises DataError, which names the file, the line and the field."""
    return cls(
        **{
            name: read_field(fields, name)
            for name, read_field, has_default in _get_readers(cls)
            if not has_default or name in fields
        }
    )


def write(value: Any) -> Any:
    """Return a dataclass or a field's value as JSON values. `read` makes an equal one from them."""
    if dataclasses.is_dataclass(value):
        cls: Any = type(value)
        return {
            name: write(each)
            for name, is_left_out in _get_names(cls)
            if (each := getattr(value, name)) is not None or not is_left_out
        }
    if isinstance(value, Mapping):
        return {key: write(each) for key, each in value.items()}
    return [write(each) for each in value] if isinstance(value, list | tuple) else value


@cache
def _get_readers(cls: Any) -> list[tuple[str, Read, bool]]:
    """Each field's name and reader, and whether it has a default."""
    return [
        (field.name, _make_reader(kind), not (field.default is field.default_factory is dataclasses.MISSING))
        for field, kind in _get_fields(cls)
    ]


@cache
def _get_names(cls: Any) -> list[tuple[str, bool]]:
    """Each field's name, and whether it is left out if it is None."""
    return [(field.name, LeftOut in getattr(kind, "__metadata__", ())) for field, kind in _get_fields(cls)]


def _get_fields(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    kinds = get_type_hints(cls, include_extras=True)
    return [(field, kinds[field.name]) for field in dataclasses.fields(cls)]


def _make_reader(kind: Any, bounds: Range | None = None) -> Read:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _make_reader(args[0], next((each for each in args[1:] if isinstance(each, Range)), bounds))
    if origin in (Union, UnionType):
        (one,) = (each for each in args if each is not NoneType)
        known = _make_reader(one, bounds)
        if dataclasses.is_dataclass(one):
            return lambda fields, name: known(fields, name) if _has_value(fields, name, one) else None
        return lambda fields, name: known(fields, name) if name in fields else None
    if origin is Literal:
        return lambda fields, name: _read_choice(fields, name, args)
    if origin is tuple:
        item = _make_reader(args[0])
        return lambda fields, name: tuple(_read_all(fields.items(name), item).values())
    if origin is Mapping:
        value = _make_reader(args[1])
        return lambda fields, name: _read_all(fields.part(name), value)
    if dataclasses.is_dataclass(kind):
        cls: Any = kind
        return lambda fields, name: read(cls, fields.part(name))
    if kind is int:
        low, high = int((bounds or COUNT).low), int((bounds or COUNT).high)
        return lambda fields, name: fields.integer(name, low, high)
    if kind is float:
        least, most = (bounds or SECONDS).low, (bounds or SECONDS).high
        return lambda fields, name: fields.number(name, most, least)
    if kind is Any:
        return lambda fields, name: fields.values[name]
    return {str: Fields.string, bool: Fields.flag}[kind]


def _has_value(fields: Fields, name: str, cls: Any) -> bool:
    """Whether a field is there, and is not an object without known values."""
    if name not in fields:
        return False
    part = fields.part(name)
    return not part.values or any(each in part for each, _ in _get_names(cls))


def _read_choice(fields: Fields, name: str, choices: tuple[str, ...]) -> str:
    value = fields.string(name)
    if value not in choices:
        raise fields.error(name, f"must be one of {', '.join(choices)}, got {show(value)}")
    return value


def _read_all(part: Fields, read_value: Read) -> dict[str, Any]:
    return {key: read_value(part, key) for key in part.values}
