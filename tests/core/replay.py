"""Ask a fresh policy everything a log says another was asked; it must answer the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_type_hints

from tenuto.core import types
from tenuto.core.asking import PolicyCaller, to_json
from tenuto.core.policy import Policy

KINDS: dict[str, type | tuple[type, ...]] = {
    "queue_key": tuple,
    "admit": bool,
    "retain": (types.Keep, types.Offload, types.Release),
    "reconsider": (types.Keep, types.Offload, types.Release),
    "evict_key": tuple,
    "preempt_key": tuple,
    "step_budget": (int, type(None)),
}
"""What each asked hook may answer."""


def replay(records: Iterable[dict[str, Any]], policy: Policy) -> list[str]:
    """Tell and ask a fresh policy what the records say, in order; returns the answers that differ."""
    caller = PolicyCaller(policy)
    differences = []
    for number, record in enumerate(records):
        if record["kind"] not in ("asked", "told"):
            continue
        inputs = [from_json(value) for value in record["inputs"]]
        if record["kind"] == "told":
            caller.tell(record["hook"], *inputs)
            continue
        answer = json.loads(json.dumps(to_json(caller.ask(record["hook"], KINDS[record["hook"]], *inputs))))
        if answer != record["answer"]:
            differences.append(f"record {number}: {record['hook']} was {record['answer']}, is {answer}")
    return differences


def from_json(value: Any) -> Any:
    """The view or decision that `to_json` wrote down."""
    if isinstance(value, dict) and "type" in value:
        cls = getattr(types, value["type"])
        hints = get_type_hints(cls)
        return cls(
            **{
                field.name: _read_field(value[field.name], hints[field.name])
                for field in dataclasses.fields(cls)
            }
        )
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value


def _read_field(value: Any, kind: Any) -> Any:
    if isinstance(kind, UnionType) and value is not None:
        [kind] = [one for one in get_args(kind) if one is not type(None)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return from_json(value)
