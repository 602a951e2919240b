"""The options of a run, as its record keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ALWAYS = ("gpu", "model", "policy", "workload", "seed", "async_scheduling")
"""Options that are recorded even if they have their default values.

Records without `async_scheduling` are from versions that had it off by default."""


def get_config(*options: Any) -> dict[str, Any]:
    """Return the options of these dataclasses that differ from their defaults, in JSON types."""
    config: dict[str, Any] = {}
    for part in options:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            default = field.default if field.default is not dataclasses.MISSING else {}
            if value != default or field.name in ALWAYS:
                config[field.name] = _to_json(value)
    return config


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return get_config(value)
    return dict(value) if isinstance(value, Mapping) else value
