"""Calling a router: guarded, counted and logged, as `tenuto.core.policy_caller` calls a policy.

A router is code from outside. If it raises, or names an engine that is not there, the turn goes to its job's
engine, or else to the engine with the fewest open turns.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from tenuto.core.errors import PolicyError
from tenuto.core.policy import Key
from tenuto.core.policy_caller import DecisionLog, is_key, to_json
from tenuto.core.routing.router import Router, get_least_loaded
from tenuto.core.routing.types import FleetView, Hold, Route, RoutedTurn, Send

logger = logging.getLogger("tenuto")


class RouterCaller:
    """Asks and tells one router. With `strict`, a fault is raised as PolicyError instead."""

    def __init__(self, router: Router, log: DecisionLog | None = None, *, strict: bool = False) -> None:
        self.router = router
        self.faults: Counter[str] = Counter()
        """How often each hook failed."""
        self._log = log
        self._strict = strict
        self._stock = Router()

    def ask_route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Where a turn goes. At least one engine takes turns."""
        try:
            answer = self.router.route(turn, fleet)
            check_route(answer, turn, fleet)
        except Exception as error:
            self._fault("route", (turn, fleet), error)
            answer = Send(turn.engine or get_least_loaded(fleet.engines.values()).name)
        if self._log is not None:
            inputs = [to_json(turn), fleet.now_s]
            self._log({"kind": "asked", "hook": "route", "inputs": inputs, "answer": to_json(answer)})
        return answer

    def ask_held_key(self, turn: RoutedTurn, now_s: float) -> Key:
        """The key that orders a turn among those that are held."""
        try:
            key = self.router.held_key(turn, now_s)
            if not is_key(key):
                raise TypeError(f"answered {key!r}, which is not a tuple of numbers and strings")
        except Exception as error:
            self._fault("held_key", (turn,), error)
            return self._stock.held_key(turn, now_s)
        return key

    def tell(self, hook: str, *inputs: Any) -> None:
        """Call a told hook, if the router overrides it."""
        if not self.router.overrides(hook):
            return
        try:
            getattr(self.router, hook)(*inputs)
        except Exception as error:
            self._fault(hook, inputs, error)

    def _fault(self, hook: str, inputs: tuple[Any, ...], error: Exception) -> None:
        name = type(self.router).__name__
        if self._strict:
            if isinstance(error, PolicyError):
                raise error
            raise PolicyError(f"router {name}: {hook} failed: {error!r}; asked with {inputs!r}") from error
        self.faults[hook] += 1
        if self.faults[hook] == 1:
            logger.error("router %s: %s failed (%r); further faults are only counted", name, hook, error)


def check_route(answer: object, turn: RoutedTurn, fleet: FleetView) -> None:
    """Raise TypeError or ValueError if a router may not answer this."""
    if isinstance(answer, Hold):
        if turn.must_go:
            raise ValueError("answered Hold for a turn that must go")
        return
    if not isinstance(answer, Send):
        raise TypeError(f"answered {answer!r}, which is neither Send nor Hold")
    if answer.engine not in fleet.engines:
        raise ValueError(f"answered {answer!r}, but no such engine takes turns")
