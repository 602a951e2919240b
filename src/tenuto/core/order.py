"""Which waiting turns may start, which starts first, and which running turn is preempted.

The policy decides, within the bounds of the operator, fairness and the requests' own priorities. No turn is
held back on an idle engine, or longer than the limits allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from tenuto.core.engine import Engine
from tenuto.core.indexed_heap import SortKey, get_sort_key
from tenuto.core.jobs import JobState, TurnState
from tenuto.core.leases import Retention
from tenuto.core.limits import Canary
from tenuto.core.policy import Key
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.stats import DriverStats
from tenuto.core.stock_queue import StockQueue


class Order:
    """The order of turns, and admission. Only this class changes `is_admitted` of turns and jobs."""

    def __init__(  # noqa: PLR0913 - what an order depends on
        self,
        caller: PolicyCaller,
        engine: Engine,
        retention: Retention,
        waits: StockQueue,
        stats: DriverStats,
        canary: Canary,
        *,
        by_priority: bool = False,
    ) -> None:
        """`by_priority`: the requests' own priority comes before the policy's order."""
        self._caller = caller
        self._policy = caller.policy
        self._engine = engine
        self._retention = retention
        self._waits = waits
        self._stats = stats
        self._canary = canary
        self._by_priority = by_priority
        self._looks_up = self._policy.needs.max_waiting_with_hits > 0
        self._asks = self._policy.overrides("admit")
        self._asks_every_turn = self._policy.needs.admit == "turns"
        self._held: dict[str, TurnState] = {}
        """Turns that are not admitted yet, in order of arrival."""
        self._overdue: dict[str, TurnState] = {}
        """Turns in `_held` that are overdue, in the order in which they became overdue."""

    # What happens to turns.

    def enter(self, turn: TurnState) -> None:
        """A turn arrived, or was taken over from another driver."""
        if self._asks and self._needs_admission(turn):
            self._held[turn.turn_id] = turn

    def forget_admissions(self, jobs: Iterable[JobState], turns: Iterable[TurnState]) -> None:
        """Forget that another policy admitted these, so that this one is asked."""
        for job in jobs:
            job.is_admitted = False
        for turn in turns:
            turn.is_admitted = False

    def start(self, turn: TurnState) -> None:
        """A turn got its first step."""
        turn.job.is_admitted = True
        self.leave(turn.turn_id)

    def leave(self, turn_id: str) -> None:
        """Stop holding a turn back, because it was admitted, started or left."""
        self._held.pop(turn_id, None)
        self._overdue.pop(turn_id, None)

    # Which turns may start.

    def is_held(self, turn_id: str) -> bool:
        """Whether the policy must be asked before this turn starts."""
        return turn_id in self._held

    def may_start(self, turn: TurnState, now_s: float, *, idle: bool) -> bool:
        """Whether a waiting turn may start. Every turn may on an idle engine, or after the longest wait."""
        if self._needs_admission(turn):
            free = idle or self._waits.is_overdue(turn.turn_id)
            view = self._retention.get_turn_view(turn)
            if not free and not self._caller.ask("admit", view, self._retention.get_view(now_s)):
                self._stats.num_admission_waits += 1
                return False
            turn.is_admitted = turn.job.is_admitted = True
            if "on_turn_admitted" in self._caller.heard:
                self._caller.tell("on_turn_admitted", view, now_s)
        self.leave(turn.turn_id)
        return True

    def admit(self, first: TurnState | None, now_s: float, *, idle: bool) -> list[str]:
        """Turns that may start now: an overdue or else the first parked turn, and its job's other turns."""
        turn = next(iter(self._overdue.values()), first)
        if turn is None or not self.may_start(turn, now_s, idle=idle):
            return []
        if self._asks_every_turn:
            return [turn.turn_id]
        turn_ids = list(turn.job.live_turn_ids or ())
        for turn_id in turn_ids:
            self.leave(turn_id)
        return turn_ids

    def pop_overdue(self, now_s: float) -> Iterator[str]:
        """Turns that have become overdue since the last call. They are admitted next and start first."""
        for turn in self._waits.pop_overdue(now_s):
            if turn.turn_id in self._held:
                self._overdue[turn.turn_id] = turn
            yield turn.turn_id

    # Which turn starts first.

    def get_queue_key(self, turn: TurnState, now_s: float) -> Key:
        """The key of a waiting turn; the smallest key goes first."""
        if turn.job.runs_as_stock:
            return self.get_stock_key(turn)
        if self._waits.is_overdue(turn.turn_id):
            first: Key = (-math.inf, turn.number)
            return (turn.arrival.priority, *first) if self._by_priority else first
        view = self._retention.get_turn_view(turn)
        is_wanted = self._looks_up and self._caller.ask("wants_hits", view)
        if is_wanted and self._engine.get_num_waiting() <= self._policy.needs.max_waiting_with_hits:
            view = turn.get_view_with_hits(view, self._engine.get_num_cached_tokens(turn.turn_id))
        key: Key = (*self._caller.ask("queue_key", view, now_s), turn.number)
        return (view.priority, *key) if self._by_priority else key

    def get_stock_key(self, turn: TurnState) -> Key:
        """The key that puts a waiting turn where stock vLLM would; the smallest key goes first."""
        # vLLM's queue by priority keeps no place at the front for preempted turns.
        first = turn.arrival.priority if self._by_priority else 0 if turn.num_preemptions else 1
        return (first, turn.arrival_s, turn.number)

    # Which running turn is preempted.

    def get_victims(self, turns: Iterable[TurnState], now_s: float) -> list[str]:
        """Running turns in order of preemption; empty if the engine chooses.

        With a canary, the engine chooses. Otherwise the policy could protect its own jobs at the others'
        cost.
        """
        if not self._policy.overrides("preempt_key") or self._canary.is_on:
            return []
        view = self._retention.get_view(now_s)
        keys: dict[str, tuple[int, bool, SortKey, int]] = {}
        for state in turns:
            turn = self._retention.get_turn_view(state)
            key = self._caller.ask("preempt_key", turn, view)
            priority = -turn.priority if self._by_priority else 0
            # Otherwise, a turn that the policy puts last would start when it is overdue, and be preempted at
            # once.
            started_overdue = self._waits.started_overdue(turn.turn_id)
            newest = -state.number
            keys[turn.turn_id] = (priority, started_overdue, get_sort_key(key), newest)
        return sorted(keys, key=keys.__getitem__)

    def may_preempt(self, turn: TurnState, victim: TurnState, now_s: float) -> bool:
        """Whether a waiting turn that does not fit may preempt a running turn."""
        if self._by_priority and turn.arrival.priority > victim.arrival.priority:
            return False
        views = (self._retention.get_turn_view(each) for each in (turn, victim))
        return bool(self._caller.ask("may_preempt", *views, self._retention.get_view(now_s)))

    # Internal.

    def _needs_admission(self, turn: TurnState) -> bool:
        if turn.started or turn.is_admitted or turn.job.runs_as_stock:
            return False
        return self._asks_every_turn or not turn.job.is_admitted
