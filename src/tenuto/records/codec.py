"""Reads and writes the dataclasses of a schema. The annotations are the one declaration of each field.

A field is a `str`, `bool`, `int`, `float` or `Any`, a `Literal` of texts, another dataclass, a
`Mapping[str, X]` or a `tuple[X, ...]`. With a default, or as `X | None`, it may be missing in a file, null or
not finite. So may an object whose fields are all null or not finite. Unknown fields of a file are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tenuto.records.fields import MAX_COUNT, MAX_SECONDS, Fields, show

T = TypeVar("T")
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
    """`Annotated[X | None, LeftOut]`: not written if it is None. Other fields are written as null then."""


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
    """Return JSON values of a dataclass or of what its fields hold. `read` makes an equal one from them."""
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
    missing = dataclasses.MISSING
    return [
        (field.name, _make_reader(kind), not (field.default is missing and field.default_factory is missing))
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
    """Whether a field is there, and is no object of which nothing is known."""
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
