"""Random records, made from the annotations of the schema: a field that is added is covered by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from tenuto.records.codec import COUNT, SECONDS, Range

TEXT = st.one_of(
    st.sampled_from(["a", "b", "stock", "<b>&\"'", "_x", "$\\frac$", "é\n"]),
    st.text(st.characters(), min_size=1),
)
"""Text of strangers: with markup, control characters, and halves of UTF-16 pairs."""
NUMBERS = (0.0, 5e-324, 1e-12, 0.001, 1.0, 1 / 3, 3600.0, 1e9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


RUN_FACTS: dict[str, Any] = {
    "policy": "p",
    "gpu": "g",
    "model": "m",
    "workload": "w",
    "jps": 1.0,
    "seed": 7,
    "simulated": True,
    "loaded_tokens": 0,
    "stored_tokens": 0,
    "block_size": 16,
    "config": {},
    "wall_s": 0.1,
}
"""What no turn knows of a run, for `make_record`."""


def values_of(kind: Any, bounds: Range | None = None) -> st.SearchStrategy[Any]:
    """JSON values of a type: what a writer may write for it."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return JSON
    if origin is Annotated:
        return values_of(args[0], next((each for each in args[1:] if isinstance(each, Range)), bounds))
    if origin in (Union, UnionType):
        # None first: hypothesis shrinks to it.
        kinds = sorted(args, key=lambda each: each is not NoneType)
        return st.one_of(*(values_of(each, bounds) for each in kinds))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=4)
    if dataclasses.is_dataclass(kind):
        return objects_of(kind)
    if kind is int:
        low, high = int((bounds or COUNT).low), int((bounds or COUNT).high)
        few = st.sampled_from([low, low + 1, high]) | st.integers(low, min(high, 1000))
        return few | st.integers(low, high)
    if kind is float:
        least, most = (bounds or SECONDS).low, (bounds or SECONDS).high
        return st.sampled_from([*NUMBERS, most]) | st.floats(0.1, 100) | st.floats(least, most)
    return {NoneType: st.none(), bool: st.booleans(), str: TEXT}[kind]


def objects_of(cls: Any) -> st.SearchStrategy[dict[str, Any]]:
    """JSON objects of a dataclass of the schema, with all its fields."""
    kinds = get_type_hints(cls, include_extras=True)
    return st.fixed_dictionaries(
        {field.name: values_of(kinds[field.name]) for field in dataclasses.fields(cls)}
    )


def get_full_value(kind: Any) -> Any:
    """A JSON value of a type with every field set to something that is no default."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Annotated, Union, UnionType):
        return get_full_value(next(each for each in args if each is not NoneType))
    if origin is Literal:
        return args[-1]
    if origin is tuple:
        return [get_full_value(args[0])]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"1": get_full_value(args[1])}
    if dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind, include_extras=True)
        return {field.name: get_full_value(kinds[field.name]) for field in dataclasses.fields(kind)}
    return {Any: "any", bool: True, str: "text", int: 3, float: 2.5}[kind]
