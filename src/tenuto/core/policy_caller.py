"""Calls a policy's hooks, guards against faults, logs the calls, and replays them from a log.

A policy may be user code. If a hook raises or answers with the wrong type, the engine must go on: stock's
answer is used, the fault is counted, and the first fault of each hook is logged.

A policy sees only the inputs of its hooks, and the log has all of them in order. So the log is enough to make
every decision again (`Replay`), on any machine and without an engine.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from tenuto.core import types
from tenuto.core.errors import DataError, PolicyError
from tenuto.core.policy import ANSWERS, TOLD_HOOKS, LearnsDecodes, Policy, Reports
from tenuto.core.types import DecodeSteps

logger = logging.getLogger("vllm.tenuto")

LogRecord = dict[str, Any]
DecisionLog = Callable[[LogRecord], None]

_KEY_PARTS = (int, float, str)
MAX_FIGURES = 16
"""Most figures of one policy on `/metrics`."""
MAX_SHOWN_CHARS = 400
"""Most characters of a hook's inputs in an error message."""


class PolicyCaller:
    """Calls one policy's hooks. With `strict`, a fault raises PolicyError."""

    def __init__(self, policy: Policy, log: DecisionLog | None = None, *, strict: bool = False) -> None:
        self.policy = policy
        self.log = log
        self.faults: Counter[str] = Counter()
        """How often each hook failed."""
        self._strict = strict
        self._stock = Policy()
        # A log has all events of turns. It has steps and ticks only if the policy learns from them.
        told_of_turns = set(TOLD_HOOKS) - {"on_step", "on_tick"} if log is not None else set()
        self.heard = {hook for hook in TOLD_HOOKS if policy.overrides(hook) or hook in told_of_turns}
        """The told hooks that the policy or the log uses. For others, callers need not make the inputs."""

    @property
    def num_faults(self) -> int:
        """How many hook calls have failed so far."""
        return self.faults.total()

    @property
    def refuses_steadily(self) -> bool:
        """Whether a refusal of `may_reclaim` holds for later steps too, so that it need not be asked in each.

        False with a log, because a replay needs every answer.
        """
        return self.log is None and self.policy.needs.steady_reclaim

    def ask(self, hook: str, *inputs: Any) -> Any:
        """The policy's answer to an asked hook, or stock's if it faults. Raises PolicyError if strict."""
        try:
            answer = getattr(self.policy, hook)(*inputs)
            check_answer(hook, answer)
        except Exception as error:
            self._fault(hook, inputs, error)
            answer = getattr(self._stock, hook)(*inputs)
        if self.log is not None:
            self.log({"kind": "asked", "hook": hook, "inputs": to_json(inputs), "answer": to_json(answer)})
        return answer

    def tell(self, hook: str, *inputs: Any) -> None:
        """Call a told hook. A fault is counted and otherwise ignored. Raises PolicyError if strict."""
        if self.log is not None:
            self.log({"kind": "told", "hook": hook, "inputs": to_json(inputs)})
        try:
            getattr(self.policy, hook)(*inputs)
        except Exception as error:
            self._fault(hook, inputs, error)

    def tell_decodes(self, steps: DecodeSteps) -> None:
        """Tell `on_step` of each step, or all in one call if the policy can do that and there is no log."""
        if self.log is not None or not isinstance(self.policy, LearnsDecodes):
            for step in steps:
                self.tell("on_step", step)
            return
        try:
            self.policy.learn_decodes(steps)
        except Exception as error:
            self._fault("on_step", (steps,), error)

    def get_figures(self) -> dict[str, float]:
        """The figures that the policy reports; empty after a fault, which is counted."""
        if not isinstance(self.policy, Reports):
            return {}
        try:
            figures = list(self.policy.get_figures().items())[:MAX_FIGURES]
            return {str(name): float(value) for name, value in figures}
        except Exception as error:
            self._fault("get_figures", (), error)
            return {}

    def _fault(self, hook: str, inputs: tuple[Any, ...], error: Exception) -> None:
        if self._strict:
            raise PolicyError(describe_fault(self.policy, hook, inputs, error)) from error
        self.faults[hook] += 1
        if self.faults[hook] == 1:
            logger.error(
                "policy %s: %s failed (%r); stock's answer is used there, further faults are only counted",
                type(self.policy).__name__,
                hook,
                error,
                exc_info=error,
            )


def check_answer(hook: str, answer: Any) -> None:
    """Raise TypeError if this is not a valid answer of an asked hook."""
    kinds = ANSWERS[hook]
    if not (is_key(answer) if tuple in kinds else isinstance(answer, kinds)):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        wanted = "tuple of numbers and strings" if tuple in kinds else wanted
        raise TypeError(f"answered {answer!r}, which is not a {wanted}")
    if hook == "step_budget" and isinstance(answer, int) and (answer is True or answer < 1):
        raise TypeError(f"answered {answer!r}, which is not a number of tokens from 1 up")


def is_key(answer: Any) -> bool:
    """Whether an answer can be used as a sort key: a tuple of numbers and strings, without NaN."""
    if not isinstance(answer, tuple):
        return False
    for part in answer:  # noqa: SIM110 - a key is asked for every turn that waits, and `all` takes twice as long
        if not isinstance(part, _KEY_PARTS) or part != part:
            return False
    return True


def describe_fault(policy: Policy, hook: str, inputs: tuple[Any, ...], error: Exception) -> str:
    """An error message: what went wrong in which hook, with which inputs."""
    shown = ", ".join(map(repr, inputs))
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}…"
    is_answer = isinstance(error, TypeError) and str(error).startswith("answered")
    what = str(error) if is_answer else f"raised {error!r}"
    return f"policy {type(policy).__name__}: {hook} {what}; asked with {shown}"


def to_json(value: Any) -> Any:
    """A view or a decision as a JSON value. A dataclass has its type's name as `type`."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


# Replay from a log.


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """An answer that differs from the logged one, both as JSON values."""

    hook: str
    inputs: Any
    was: Any
    answer: Any


class Replay:
    """Repeats the calls of a log on a new policy, in order."""

    def __init__(self, policy: Policy) -> None:
        self.num_asked = 0
        self.policy = policy
        self._caller = PolicyCaller(policy)

    def feed(self, record: Mapping[str, Any]) -> Difference | None:
        """Repeat the next record. Returns the difference if the answer is not the logged one, else None.

        Records that are neither `asked` nor `told` are ignored. Raises DataError for a record that this
        version's hooks do not accept.
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
            raise DataError(f"the inputs of {hook} are not those of this version: {error!r}") from None
        if kind == "told":
            self._caller.tell(hook, *inputs)
            return None
        if "answer" not in record:
            raise DataError(f"{hook} was asked, but its answer is missing")
        self.num_asked += 1
        # Convert to JSON and back, as the logged answer was, so that equal answers compare as equal. Reasons
        # are not part of a decision and are not compared.
        answer = json.loads(json.dumps(to_json(self._caller.ask(hook, *inputs))))
        return None if from_json(answer) == from_json(was) else Difference(hook, written, was, answer)


def _check_inputs(hook: str, inputs: list[Any]) -> None:
    """Raise TypeError if a hook of this version does not take these inputs."""
    kinds = get_kinds(hook)
    if len(inputs) != len(kinds) or not all(map(_fits, inputs, kinds)):
        raise TypeError(f"it takes {', '.join(map(_name_kind, kinds))}")


@cache
def get_kinds(hook: str) -> tuple[Any, ...]:
    """The types of the inputs of a policy's hook."""
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
    """The view or decision that `to_json` converted. Missing fields get their defaults."""
    if isinstance(value, dict) and "type" in value:
        cls, kinds = _get_view(value["type"])
        return cls(**{name: _read_field(value[name], kind) for name, kind in kinds if name in value})
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value


@cache
def _get_view(name: str) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """A class of `types` and the types of its fields. Raises ValueError if there is no such class."""
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
