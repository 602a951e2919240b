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
from typing import Any, get_args, get_origin, get_type_hints

from tenuto.core import types
from tenuto.core.errors import DataError
from tenuto.core.policy import ANSWERS, TOLD_HOOKS, Policy
from tenuto.core.policy_caller import PolicyCaller, to_json


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
        self.policy = policy
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
            _check_inputs(hook, inputs)
            was = to_json(from_json(record.get("answer")))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"what {hook} was given is not this version's: {error!r}") from None
        if kind == "told":
            self._caller.tell(hook, *inputs)
            return None
        if "answer" not in record:
            raise DataError(f"{hook} was asked, but its answer is missing")
        self.num_asked += 1
        # Through JSON, as the logged answer went: what it makes equal is equal. What is no part of a
        # decision, its reason, is not compared.
        answer = json.loads(json.dumps(to_json(self._caller.ask(hook, *inputs))))
        return None if from_json(answer) == from_json(was) else Difference(hook, written, was, answer)


def _check_inputs(hook: str, inputs: list[Any]) -> None:
    """Raise TypeError if a hook of this version does not take these inputs."""
    kinds = _get_kinds(hook)
    if len(inputs) != len(kinds) or not all(map(_fits, inputs, kinds)):
        raise TypeError(f"it takes {', '.join(map(_name_kind, kinds))}")


@cache
def _get_kinds(hook: str) -> tuple[Any, ...]:
    hints = get_type_hints(getattr(Policy, hook))
    return tuple(kind for name, kind in hints.items() if name != "return")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type that a hook or a view declares."""
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(each, get_args(kind)[0]) for each in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def _name_kind(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def from_json(value: Any) -> Any:
    """The view or decision that `policy_caller.to_json` wrote down; fields it lacks have their defaults."""
    if isinstance(value, dict) and "type" in value:
        cls, kinds = _get_view(value["type"])
        return cls(**{name: _read_field(value[name], kind) for name, kind in kinds if name in value})
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value


@cache
def _get_view(name: str) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """A class of `types`, and its fields with their kinds. Raises ValueError if there is none."""
    cls = getattr(types, name, None)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"no view or decision is called {name!r}")
    hints = get_type_hints(cls)
    return cls, tuple((field.name, hints[field.name]) for field in dataclasses.fields(cls))


def _read_field(value: Any, kind: Any) -> Any:
    if isinstance(kind, UnionType):
        if value is None:
            return None
        [kind] = [one for one in get_args(kind) if one is not type(None)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    read = from_json(value)
    if not _fits(read, kind):
        raise TypeError(f"must be {_name_kind(kind)}, got {value!r}")
    return read
