"""Calling a policy: guarded, and logged so that the decisions can be made again.

A policy is code from outside. If a hook raises or answers with the wrong type, the engine must go on:
stock's answer is used, the fault is counted, and each hook is reported once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

from tenuto.core.errors import PolicyError
from tenuto.core.policy import ANSWERS, TOLD_HOOKS, Policy, Reports

logger = logging.getLogger("tenuto")

LogRecord = dict[str, Any]
DecisionLog = Callable[[LogRecord], None]

_KEY_PARTS = (int, float, str)
MAX_FIGURES = 16
"""Of one policy on `/metrics`."""
MAX_SHOWN_CHARS = 400
"""Of a hook's inputs in an error message."""


class PolicyCaller:
    """Asks and tells one policy. With `strict`, a fault is raised as PolicyError instead."""

    def __init__(self, policy: Policy, log: DecisionLog | None = None, *, strict: bool = False) -> None:
        self.policy = policy
        self.log = log
        self.faults: Counter[str] = Counter()
        """How often each hook failed."""
        self._strict = strict
        self._stock = Policy()
        # A log has all that happens to turns; steps and ticks only for a policy that learns from them.
        told_of_turns = set(TOLD_HOOKS) - {"on_step", "on_tick"} if log is not None else set()
        self._heard = {hook for hook in TOLD_HOOKS if policy.overrides(hook) or hook in told_of_turns}

    @property
    def num_faults(self) -> int:
        """How many hook calls have failed so far."""
        return self.faults.total()

    def hears(self, hook: str) -> bool:
        """Whether the policy or the log uses this told hook; if not, its inputs need not be made."""
        return hook in self._heard

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

    def write(self, record: LogRecord) -> None:
        """Log what someone other than the policy decided."""
        if self.log is not None:
            self.log(record)

    def tell(self, hook: str, *inputs: Any) -> None:
        """Call a told hook. A fault is counted and otherwise ignored. Raises PolicyError if strict."""
        if self.log is not None:
            self.log({"kind": "told", "hook": hook, "inputs": to_json(inputs)})
        try:
            getattr(self.policy, hook)(*inputs)
        except Exception as error:
            self._fault(hook, inputs, error)

    def get_figures(self) -> dict[str, float]:
        """The figures that the policy reports about what it learned; a fault is counted and gives none."""
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
            )


def check_answer(hook: str, answer: Any) -> None:
    """Raise TypeError if an asked hook may not answer this."""
    kinds = ANSWERS[hook]
    if not (is_key(answer) if tuple in kinds else isinstance(answer, kinds)):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        wanted = "tuple of numbers and strings" if tuple in kinds else wanted
        raise TypeError(f"answered {answer!r}, which is not a {wanted}")


def is_key(answer: Any) -> bool:
    """Whether an answer can be used as a sort key: a tuple of numbers and strings, without NaN."""
    return isinstance(answer, tuple) and all(isinstance(part, _KEY_PARTS) and part == part for part in answer)


def describe_fault(policy: Policy, hook: str, inputs: tuple[Any, ...], error: Exception) -> str:
    """What went wrong in which hook, with which inputs."""
    shown = ", ".join(map(repr, inputs))
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}…"
    is_answer = isinstance(error, TypeError) and str(error).startswith("answered")
    what = str(error) if is_answer else f"raised {error!r}"
    return f"policy {type(policy).__name__}: {hook} {what}; asked with {shown}"


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
