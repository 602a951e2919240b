"""Settings: dataclass fields that carry their own help and bounds, and the check that reads them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tenuto.core.errors import ConfigError


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declare one setting: a dataclass field whose type and bounds `check_settings` checks."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def parse_option(text: str) -> tuple[str, Any]:
    """A command line's `KEY=VALUE`, the value JSON or else the text itself. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option wants KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def check_settings(cls: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check configured values against a dataclass of settings; returns them as its keyword arguments.

    `where` says in messages whose settings these are. Raises ConfigError naming the key.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: must be an object of settings, got {given!r}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    types = get_type_hints(cls)
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise ConfigError(f"{where}: unknown key {key!r}; known keys: {known}")
        try:
            checked[key] = _check_value(value, types[key], fields[key].metadata)
        except ConfigError as error:
            raise ConfigError(f"{where}: key {key!r} {error}") from None
    return checked


def _check_value(value: Any, kind: Any, metadata: Mapping[str, Any]) -> Any:
    # An int is taken for a float; a bool is never taken for a number.
    allowed = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    allowed = tuple(get_origin(one) or one for one in allowed)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise ConfigError("is too large a number") from None
    if not any(type(value) is one for one in allowed):
        wanted = " or ".join(getattr(one, "__name__", str(one)) for one in allowed)
        raise ConfigError(f"must be {wanted}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"must be finite, got {value}")
    minimum, maximum, choices = (metadata.get(k) for k in ("minimum", "maximum", "choices"))
    if minimum is not None and value is not None and value < minimum:
        raise ConfigError(f"must be at least {minimum:g}, got {value!r}")
    if maximum is not None and value is not None and value > maximum:
        raise ConfigError(f"must be at most {maximum:g}, got {value!r}")
    if choices is not None and value not in choices:
        raise ConfigError(f"must be one of {', '.join(choices)}; got {value!r}")
    return value
