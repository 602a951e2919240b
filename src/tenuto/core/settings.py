"""Settings: dataclass fields with their help texts and bounds, and checks of their values.

`setting` declares a field of a policy or of the plugin, whose value comes from JSON. `option` declares a
field whose value comes from a command line; `tenuto.cli.command` makes the flag from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, Union, Unpack, get_args, get_origin, get_type_hints

from tenuto.core.errors import ConfigError, suggest

MAX_TIER_GB = 1e9
"""Most memory of a tier, GiB. More is a typing error."""
MAX_WHOLE = 2**63 - 1
"""The largest whole number of any setting. A larger one is a typing error, and overflows in floats."""

_BOUNDS = (
    ("minimum", "at least", operator.ge),
    ("maximum", "at most", operator.le),
    ("above", "above", operator.gt),
    ("below", "below", operator.lt),
)


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    is_file: bool = False,
) -> Any:
    """Declare one setting: a dataclass field whose type and bounds `check_settings` checks.

    `is_file`: it names a file that is read.
    """
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices, "is_file": is_file}
    return dataclasses.field(default=default, metadata=metadata)


class Form(TypedDict, total=False):
    """How an option is written on the command line, and its allowed values."""

    flag: str
    """The flag. By default it is made from the field's name: `window_s` gives `--window`."""
    alias: str
    """Another name for the flag."""
    metavar: str
    """The placeholder for the value in the help."""
    group: str
    """Its heading in the help; by default the class's `GROUP`."""
    is_positional: bool
    """Whether the option is positional: it has no flag, and `metavar` is its name."""
    is_repeatable: bool
    """For a tuple: whether the flag may be repeated. If not, the value is one list with commas."""
    takes_several: bool
    """For a tuple: several values, with spaces or commas between them, may follow the flag."""
    is_written: bool
    """Whether the option names a file (with the metavar DIR, a folder) that the command writes at its end."""
    read: Callable[[Any], Any]
    """Converts the text, or the list of texts if the flag is repeatable, to the field's value."""
    environment: str
    """The environment variable that is used if the flag is not given."""
    shown_default: str
    """The default that the help shows, if it differs from the field's default."""
    minimum: float
    maximum: float
    above: float
    below: float
    choices: tuple[str, ...]


def option(default: Any, help: str, **form: Unpack[Form]) -> Any:
    """Declare one option of a command: a dataclass field.

    If the default is `dataclasses.MISSING`, the option is required. If it is a class, the class is called.
    """
    kind = "default_factory" if isinstance(default, type) else "default"
    return dataclasses.field(**{kind: default}, metadata={"help": help, "is_option": True, **form})


class Options:
    """Base class of commands' options: frozen dataclasses that check their fields when they are made."""

    GROUP = "options"
    """The help's heading for the fields that a class declares."""

    def __post_init__(self) -> None:
        """Check each field against its `option` and its type. Raises ConfigError naming the flag."""
        kinds = _get_kinds(type(self))  # type: ignore[arg-type]  # a type is hashable
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            kind, values = kinds[field.name], (getattr(self, field.name),)
            of_tuple = next((each for each in (kind, *get_args(kind)) if get_origin(each) is tuple), None)
            if of_tuple is not None and isinstance(values[0], tuple):
                kind, values = get_args(of_tuple)[0], values[0]
            for each in values:
                try:
                    _check_value(each, kind, field)
                except ConfigError as error:
                    raise ConfigError(f"{get_flag(field)} {error}") from None


_get_kinds = cache(get_type_hints)


def get_choices(field: dataclasses.Field[Any], kind: Any) -> tuple[str, ...] | None:
    """The allowed values of a field, by its declaration or its Literal type; None for any value."""
    if declared := field.metadata.get("choices"):
        return tuple(declared)
    for each in (kind, *get_args(kind)):
        if get_origin(each) is Literal:
            return get_args(each)
    return None


def get_flag(field: dataclasses.Field[Any]) -> str:
    """The flag of a field."""
    if field.metadata.get("is_positional"):
        return str(field.metadata["metavar"])
    flag = field.metadata.get("flag")
    return str(flag) if flag else "--" + field.name.removesuffix("_s").replace("_", "-")


def find_problem(value: Any, metadata: Mapping[str, Any]) -> str | None:
    """What is wrong with a value, by its field's bounds and choices, as text; None if it is valid."""
    if value is None:
        return None
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        return f"must be one of {', '.join(choices)}; got {value!r}{suggest(value, choices)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be finite, got {value}"
    for name, words, is_kept in _BOUNDS:
        bound = metadata.get(name)
        if bound is not None and not is_kept(value, bound):
            return f"must be {words} {bound:g}, got {value!r}"
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        return f"must be at most {MAX_WHOLE}, got a number of {value.bit_length()} bits"
    return None


def parse_policy_options(given: Iterable[str], policy: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """One policy's options, from a command line's `KEY=VALUE` and `POLICY:KEY=VALUE`.

    `others`: the command's other policies. Raises ConfigError.
    """
    known = {policy, *others}
    options = {}
    for text in given:
        key, value = parse_option(text)
        whose, colon, name = key.rpartition(":")
        if colon and whose not in known:
            raise ConfigError(f"option {key!r}: this command has no {whose!r}{suggest(whose, known)}")
        if not colon or whose == policy:
            options[name] = value
    return options


def parse_option(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE` from a command line. The value is read as JSON, or else is the text itself.

    Raises ConfigError.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} must be KEY=VALUE")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):  # not JSON; or a number too long, or nested too deep
        return key, value


def check_settings(cls: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check configured values against a dataclass of settings; returns them as its keyword arguments.

    `where`: the owner of the settings, for messages. Raises ConfigError naming the key.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: must be an object of settings, got {given!r}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    types = get_type_hints(cls)
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            near = suggest(key, fields)
            raise ConfigError(f"{where}: unknown key {key!r}; known keys: {known}{near}")
        try:
            checked[key] = _check_value(value, types[key], fields[key])
        except ConfigError as error:
            raise ConfigError(f"{where}: key {key!r} {error}") from None
    return checked


def _check_value(value: Any, kind: Any, field: dataclasses.Field[Any]) -> Any:
    """The value of a field, or of one of its tuple; an int as a float. Raises ConfigError."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    allowed = tuple(str if get_origin(one) is Literal else get_origin(one) or one for one in kinds)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise ConfigError("is too large a number") from None
    # A bool is never accepted as a number.
    if not (bool in allowed if isinstance(value, bool) else isinstance(value, allowed)):
        wanted = " or ".join("None" if one is NoneType else one.__name__ for one in allowed)
        raise ConfigError(f"must be {wanted}, got {value!r}")
    if problem := find_problem(value, {**field.metadata, "choices": get_choices(field, kind)}):
        raise ConfigError(problem)
    return value
