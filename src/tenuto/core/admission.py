"""Admission: asks the policy whether a turn may start, and limits how long a turn is held back."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tenuto.core.jobs import TurnState
from tenuto.core.limits import Limits
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.retention import Retention
from tenuto.core.stats import DriverStats
from tenuto.core.stock_queue import StockQueue


class Admission:
    """Asks the policy which turns may start. No turn is held back on an idle engine or beyond the limit."""

    def __init__(
        self,
        caller: PolicyCaller,
        retention: Retention,
        limits: Limits,
        stats: DriverStats,
        stock_queue: StockQueue | None,
    ) -> None:
        """`stock_queue` is None if no limit bounds how long turns wait."""
        self._stock_queue = stock_queue
        self._caller = caller
        self._retention = retention
        self._limits = limits
        self._stats = stats
        self._asks = caller.policy.overrides("admit")
        self._asks_every_turn = caller.policy.needs.admit == "turns"
        self._waiting: dict[str, TurnState] = {}
        """Turns that are not admitted yet, in order of arrival."""
        self._overdue: dict[str, TurnState] = {}
        """Turns not admitted yet that are overdue, in the order in which they became overdue."""

    def needs(self, turn: TurnState | None) -> bool:
        """Whether the policy must be asked before this turn starts."""
        if turn is None or turn.started or turn.is_admitted or turn.job.runs_as_stock:
            return False
        return self._asks_every_turn or not turn.job.is_admitted

    def enter(self, turn: TurnState) -> None:
        """A turn arrived."""
        if self._stock_queue is not None:
            self._stock_queue.arrive(turn, self._retention.get_num_leased_tokens())
        if self._asks and self.needs(turn):
            self._waiting[turn.turn_id] = turn

    def leave(self, turn: TurnState) -> None:
        """Stop tracking a turn: it was admitted, it started, or it left."""
        self._waiting.pop(turn.turn_id, None)
        self._overdue.pop(turn.turn_id, None)

    def start(self, turn: TurnState, num_hit_tokens: int, now_s: float) -> None:
        """A turn got its first step."""
        self.leave(turn)
        if self._stock_queue is not None:
            self._stock_queue.start(turn, num_hit_tokens, now_s)

    def preempt(self, turn: TurnState, now_s: float) -> None:
        """A running turn lost its blocks and waits again."""
        if self._stock_queue is not None:
            self._stock_queue.preempt(turn, now_s)

    def resume(self, turn: TurnState, now_s: float) -> None:
        """A preempted turn runs again."""
        if self._stock_queue is not None:
            self._stock_queue.resume(turn, now_s)

    def finish(self, turn: TurnState, num_output_tokens: int, now_s: float) -> None:
        """A turn ended, or left before it started."""
        self.leave(turn)
        if self._stock_queue is not None:
            self._stock_queue.leave(turn, num_output_tokens, now_s)

    def pop_overdue(self, now_s: float) -> Iterator[str]:
        """Turns that have become overdue since the last call; they will be admitted next."""
        for turn in self._stock_queue.pop_overdue(now_s) if self._stock_queue is not None else ():
            if turn.turn_id in self._waiting:
                self._overdue[turn.turn_id] = turn
            yield turn.turn_id

    def get_next_overdue_s(self) -> float:
        """When the next turn becomes overdue because of its waiting time; infinity if no turn can."""
        return math.inf if self._stock_queue is None else self._stock_queue.get_next_s()

    def admit(self, first: TurnState | None, now_s: float, *, idle: bool) -> list[str]:
        """Turns that may start now: an overdue turn or the first parked one, and other turns of its job."""
        longest = next(iter(self._overdue.values()), None) or next(iter(self._waiting.values()), None)
        turn = longest if longest is not None and self._is_overdue(longest, now_s) else first
        if turn is None or not self.may_start(turn, now_s, idle=idle):
            return []
        if self._asks_every_turn:
            return [turn.turn_id]
        for turn_id in turn.job.live_turn_ids:
            self._waiting.pop(turn_id, None)
            self._overdue.pop(turn_id, None)
        return list(turn.job.live_turn_ids)

    def may_start(self, turn: TurnState, now_s: float, *, idle: bool) -> bool:
        """Whether a waiting turn may start; every turn may on an idle engine or after the longest wait."""
        if self.needs(turn):
            free = idle or self._is_overdue(turn, now_s)
            view = self._retention.get_turn_view(turn)
            if not free and not self._caller.ask("admit", view, self._retention.get_view(now_s)):
                self._stats.num_admission_waits += 1
                return False
            turn.is_admitted = turn.job.is_admitted = True
            if self._caller.hears("on_turn_admitted"):
                self._caller.tell("on_turn_admitted", view, now_s)
        self.leave(turn)
        return True

    def _is_overdue(self, turn: TurnState, now_s: float) -> bool:
        return turn.is_overdue or now_s - turn.arrival_s >= self._limits.max_held_back_s
