"""The order of turns: which waiting turn starts first, and which running turn is preempted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from tenuto.core.canary import Canary
from tenuto.core.engine import Engine
from tenuto.core.indexed_heap import SortKey, get_sort_key
from tenuto.core.jobs import TurnState
from tenuto.core.policy import Key
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.retention import Retention


class Order:
    """The policy's order, within what the operator and the requests' own priorities allow."""

    def __init__(
        self,
        caller: PolicyCaller,
        engine: Engine,
        retention: Retention,
        canary: Canary,
        *,
        by_priority: bool = False,
    ) -> None:
        self._caller = caller
        self._policy = caller.policy
        self._engine = engine
        self._retention = retention
        self._canary = canary
        self._by_priority = by_priority
        self._looks_up = self._policy.needs.max_waiting_with_hits > 0

    def get_queue_key(self, turn: TurnState, now_s: float) -> Key:
        """The key of a waiting turn; the smallest key goes first."""
        if turn.job.runs_as_stock:
            return self.get_stock_key(turn)
        if turn.is_overdue:
            first: Key = (-math.inf, turn.number)
            return (turn.arrival.priority, *first) if self._by_priority else first
        view = self._retention.get_turn_view(turn)
        if self._looks_up and self._caller.ask("wants_hits", view) and self._affords_look_up(now_s):
            num_cached_tokens = self._engine.get_num_cached_tokens(turn.turn_id)
            view = dataclasses.replace(view, num_cached_tokens=num_cached_tokens)
        key: Key = self._caller.ask("queue_key", view, now_s)
        return (view.priority, *key) if self._by_priority else key

    def get_stock_key(self, turn: TurnState) -> Key:
        """The key that puts a waiting turn where stock vLLM would; the smallest key goes first."""
        key: Key = (0 if turn.num_preemptions else 1, turn.arrival_s, turn.number)
        return (turn.arrival.priority, *key) if self._by_priority else key

    def get_victims(self, turns: Iterable[TurnState], now_s: float) -> list[str]:
        """Running turns in the order in which to preempt them; empty if the engine chooses.

        With a canary the engine chooses: the policy must not spare its own jobs at the cost of the others.
        """
        if not self._policy.overrides("preempt_key") or self._canary.is_on:
            return []
        view = self._retention.get_view(now_s)
        keys: dict[str, tuple[int, bool, SortKey]] = {}
        for state in turns:
            turn = self._retention.get_turn_view(state)
            key = self._caller.ask("preempt_key", turn, view)
            priority = -turn.priority if self._by_priority else 0
            # Otherwise a turn that the policy puts last would start when it is overdue, and lose its place at
            # once.
            keys[turn.turn_id] = (priority, state.was_overdue, get_sort_key(key))
        return sorted(keys, key=lambda turn_id: (keys[turn_id], turn_id))

    def may_preempt(self, turn: TurnState, victim: TurnState, now_s: float) -> bool:
        """Whether a waiting turn that does not fit may take a running turn's place."""
        if self._by_priority and turn.arrival.priority > victim.arrival.priority:
            return False
        views = (self._retention.get_turn_view(each) for each in (turn, victim))
        return bool(self._caller.ask("may_preempt", *views, self._retention.get_view(now_s)))

    def _affords_look_up(self, now_s: float) -> bool:
        return self._engine.get_view(now_s).num_waiting <= self._policy.needs.max_waiting_with_hits
