"""Calling a policy: guarded, and logged so that the decisions can be made again.

A policy is code from outside. If a hook raises or answers with the wrong type, the engine must go on:
the stock answer is used, the fault is counted and reported once per hook.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

from tenuto.core.policy import TOLD_HOOKS, Policy

logger = logging.getLogger("tenuto")

LogRecord = dict[str, Any]
DecisionLog = Callable[[LogRecord], None]


class PolicyCaller:
    """Asks and tells one policy. With `strict`, faults are raised instead (tests, `check_policy`)."""

    def __init__(self, policy: Policy, log: DecisionLog | None = None, *, strict: bool = False) -> None:
        self.policy = policy
        self.log = log
        self.num_faults = 0
        self._strict = strict
        self._reported: set[str] = set()
        self._stock = Policy()
        # A log tells all that happens to turns, but time's passing only to a policy that learns from it.
        told_of_turns = set(TOLD_HOOKS) - {"on_step", "on_tick"} if log is not None else set()
        self._heard = {hook for hook in TOLD_HOOKS if policy.overrides(hook) or hook in told_of_turns}

    def hears(self, hook: str) -> bool:
        """Whether telling this hook reaches anyone; its inputs need not be made otherwise."""
        return hook in self._heard

    def ask(self, hook: str, kind: type | tuple[type, ...], *inputs: Any) -> Any:
        """The policy's answer to an asked hook, or stock's if it faults."""
        try:
            answer = getattr(self.policy, hook)(*inputs)
            if not (is_key(answer) if kind is tuple else isinstance(answer, kind)):
                raise TypeError(f"answered {answer!r}")
        except Exception as error:
            self._fault(hook, error)
            answer = getattr(self._stock, hook)(*inputs)
        if self.log is not None:
            self.log({"kind": "asked", "hook": hook, "inputs": to_json(inputs), "answer": to_json(answer)})
        return answer

    def tell(self, hook: str, *inputs: Any) -> None:
        """Tell the policy something; a fault is reported and the telling skipped."""
        if self.log is not None:
            self.log({"kind": "told", "hook": hook, "inputs": to_json(inputs)})
        try:
            getattr(self.policy, hook)(*inputs)
        except Exception as error:
            self._fault(hook, error)

    def _fault(self, hook: str, error: Exception) -> None:
        if self._strict:
            raise error
        self.num_faults += 1
        if hook not in self._reported:
            self._reported.add(hook)
            logger.error(
                "policy %s: %s failed (%r); stock's answer is used there, further faults are only counted",
                type(self.policy).__name__,
                hook,
                error,
            )


def is_key(answer: Any) -> bool:
    """Whether an answer can order anything: a tuple of numbers and strings, no NaN."""
    return isinstance(answer, tuple) and all(
        isinstance(part, int | float | str) and part == part for part in answer
    )


def to_json(value: Any) -> Any:
    """Views and decisions as JSON values; a dataclass carries its type's name as `type`."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value
