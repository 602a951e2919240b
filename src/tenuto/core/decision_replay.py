"""Asking a policy again: a fresh one is told and asked what a log says another was; it must answer the same.

A policy sees nothing but what it is told and asked, and both are in the log with their inputs, in order. So
the log is enough to make every decision again, on any machine and without an engine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, get_args, get_type_hints

from tenuto.core import types
from tenuto.core.errors import DataError
from tenuto.core.policy import TOLD_HOOKS, Policy
from tenuto.core.policy_caller import PolicyCaller, to_json

_DECISIONS = (types.Keep, types.Offload, types.Release)
ANSWERS: dict[str, type | tuple[type, ...]] = {
    "queue_key": tuple,
    "admit": bool,
    "load": bool,
    "retain": _DECISIONS,
    "reconsider": _DECISIONS,
    "evict_key": tuple,
    "may_reclaim": bool,
    "preempt_key": tuple,
    "may_preempt": bool,
    "step_budget": (int, type(None)),
}
"""What each asked hook may answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the one in the log, both as JSON values."""

    hook: str
    inputs: Any
    was: Any
    answer: Any


class Replay:
    """One policy, fresh, asked again what the records of a log say, in their order."""

    def __init__(self, policy: Policy) -> None:
        self.num_asked = 0
        self._caller = PolicyCaller(policy)

    def feed(self, record: Mapping[str, Any]) -> Difference | None:
        """Take the next record; returns how the policy's answer differs, if it was asked and it does.

        Records that are neither `asked` nor `told` say nothing to a policy. Raises DataError for a record
        that no policy of this version can be given.
        """
        kind = record.get("kind")
        if kind not in ("asked", "told"):
            return None
        hook, written = record.get("hook"), record.get("inputs")
        known = ANSWERS if kind == "asked" else TOLD_HOOKS
        if not isinstance(hook, str) or hook not in known or not isinstance(written, list):
            raise DataError(f"no policy of this version is {kind} {hook!r} with {str(written)[:60]}")
        try:
            inputs = [from_json(value) for value in written]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the inputs of {hook} are not this version's: {error!r}") from None
        if kind == "told":
            self._caller.tell(hook, *inputs)
            return None
        if "answer" not in record:
            raise DataError(f"{hook} was asked, but its answer is missing")
        self.num_asked += 1
        # Through JSON, as the logged answer went: what it makes equal is equal.
        answer = json.loads(json.dumps(to_json(self._caller.ask(hook, ANSWERS[hook], *inputs))))
        was = _forget_strength(record["answer"])
        return None if answer == was else Difference(hook, written, was, answer)


def from_json(value: Any) -> Any:
    """The view or decision that `asking.to_json` wrote down."""
    if isinstance(value, dict) and "type" in value:
        value = _forget_strength(value)
        cls, kinds = _get_view(value["type"])
        return cls(**{name: _read_field(value[name], kind) for name, kind in kinds})
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value


def _forget_strength(value: Any) -> Any:
    """A lease or `Keep` of 0.1 as it is written now, without a strength. Raises DataError for keep-last."""
    if not isinstance(value, dict) or "strength" not in value:
        return value
    if value["strength"] != "hold":
        raise DataError(
            f"a lease of strength {value['strength']!r}: keep-last leases ended with 0.1, "
            "replay this log with tenuto 0.1"
        )
    return {key: part for key, part in value.items() if key != "strength"}


@cache
def _get_view(name: str) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """A class of `types`, and its fields with their kinds. Raises ValueError if there is none."""
    cls = getattr(types, name, None)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"no view or decision is called {name!r}")
    hints = get_type_hints(cls)
    return cls, tuple((field.name, hints[field.name]) for field in dataclasses.fields(cls))


def _read_field(value: Any, kind: Any) -> Any:
    if isinstance(kind, UnionType) and value is not None:
        [kind] = [one for one in get_args(kind) if one is not type(None)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return from_json(value)
