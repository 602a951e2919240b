"""One engine of a fleet: it steps when it is woken, and turns come to it at any time in between.

An engine must not step past a turn that another engine's answer will bring it. So it never runs ahead: it
says when it wants to be woken next, and a turn that comes earlier is delivered in time. A stretch of quiet
steps is planned, and carried out when its end or a turn has come. What it does with the turns that it gets
is exactly what `tenuto.sim.simulation.Simulation` does with them.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, Protocol

from tenuto.sim.cost.batch import StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request
from tenuto.sim.step_loop import LiveTurn, StepLoop

ENDS, STARTS = 0, 2
"""At one moment, steps end first, then turns are sent, then steps are scheduled."""
MAX_PLANNED_STEPS = 64
"""A turn may come before a planned stretch has ended; then the rest was planned for nothing."""


class Wake(NamedTuple):
    """When an engine wants to be woken, and whether a step ends or starts then."""

    at_s: float
    order: int


class Listener(Protocol):
    """Who is told what an engine's turns do."""

    def on_first_token(self, engine: FleetEngine, turn: LiveTurn) -> None:
        """A turn's first token came."""

    def on_finished(self, engine: FleetEngine, turn: LiveTurn) -> None:
        """A turn is done."""


class FleetEngine(StepLoop):
    """One engine. `wake` is to be called at `next_wake`, unless that has changed meanwhile."""

    def __init__(self, name: str, scheduler: Scheduler, step_cost: StepCost, listener: Listener) -> None:
        super().__init__(scheduler, step_cost)
        self.name = name
        self.next_wake: Wake | None = None
        """None while it has nothing to do."""
        self.planned_wake: Wake | None = None
        """The wake that whoever drives it has put on his list."""
        self.busy_s = 0.0
        """Seconds in which a step ran."""
        self._listener = listener
        self._stretch: list[float] = []
        """Seconds of each step of the planned stretch."""

    @property
    def num_open(self) -> int:
        """Turns that were delivered and are not done."""
        return len(self._turns)

    def start(self, now_s: float) -> None:
        """It is there from now on. A first step with nothing to do starts its policy's clock."""
        self.now_s = now_s
        self.next_wake = Wake(now_s, STARTS)

    def wake(self) -> None:
        """Do what is to be done at `next_wake`."""
        assert self.next_wake is not None
        at_s, order = self.next_wake
        if self._stretch:
            self._end_stretch(math.inf)
        if order == ENDS:
            self._enter()
            self._end_step(*self._in_flight.popleft())
            self._leave()
            self.next_wake = Wake(self.now_s, STARTS)
        else:
            self.now_s = max(self.now_s, at_s)
            self._advance()

    def catch_up(self, now_s: float) -> None:
        """Carry out what is planned until `now_s`, before something happens from outside."""
        if self._stretch:
            self._end_stretch(now_s)
            self.next_wake = Wake(self.now_s, STARTS)
        elif self.next_wake is None:
            self.now_s = max(self.now_s, now_s)

    def deliver(self, turn: LiveTurn, now_s: float) -> None:
        """A turn comes in. Raises ConfigError if it can never run here."""
        self.catch_up(now_s)
        self._turns[turn.request.turn_id] = turn
        self.scheduler.add_request(turn.request, now_s)
        self.wake_if_idle(now_s)

    def abort(self, turn_id: str, now_s: float) -> None:
        """The connection of a turn broke."""
        self.catch_up(now_s)
        self.scheduler.abort(turn_id, now_s)
        del self._turns[turn_id]
        self._last_step = None
        self.wake_if_idle(now_s)

    def wake_if_idle(self, now_s: float) -> None:
        """Look for work now, if no step runs: something has changed."""
        if not self._in_flight and (self.next_wake is None or self.next_wake.at_s > now_s):
            self.next_wake = Wake(max(self.now_s, now_s), STARTS)

    def get_turns(self) -> list[LiveTurn]:
        """The turns that were delivered and are not done."""
        return list(self._turns.values())

    def insert_kv(self, request: Request, num_tokens: int, now_s: float) -> bool:
        """KV of a prompt's first tokens came from another engine. False if there was no room for it."""
        self.catch_up(now_s)
        return insert_kv(self.scheduler.kv, request, num_tokens)

    # Inside.

    def _enter(self) -> None:
        """Before the scheduler is called for a step."""

    def _leave(self) -> None:
        """After that."""

    def _advance(self) -> None:
        """Schedule from now on until there is something to wait for."""
        self._enter()
        self.next_wake = self._get_next_wake()
        self._leave()

    def _get_next_wake(self) -> Wake | None:
        while True:
            if self._plan_stretch():
                return Wake(self._get_stretch_end(), STARTS)
            step = self._schedule()
            if len(self._in_flight) == self.scheduler.config.max_steps_in_flight or (
                self._in_flight and not step.num_tokens
            ):
                return Wake(self._in_flight[0][2], ENDS)
            if not step.num_tokens and not step.preempted:
                event_s = self.scheduler.get_next_event_s()
                return None if event_s is None else Wake(event_s, STARTS)

    def _schedule(self) -> Step:
        before_s = max(self.now_s, self._last_end_s)
        step = super()._schedule()
        if step.num_tokens:
            self.busy_s += self._last_end_s - before_s
        return step

    def _plan_stretch(self) -> bool:
        num_steps = min(self._count_quiet_steps(), MAX_PLANNED_STEPS)
        self._stretch = list(itertools.islice(self._get_quiet_costs(), num_steps)) if num_steps else []
        if not self._stretch:
            return False
        num_steps = self._walk_stretch()[0]
        del self._stretch[num_steps:]
        return num_steps > 0

    def _get_stretch_end(self) -> float:
        return self._walk_stretch()[1]

    def _get_limit_s(self) -> float:
        """When something happens by itself, apart from steps."""
        event_s, tick_s = self.scheduler.get_next_event_s(), self.scheduler.driver.get_next_tick_s()
        return tick_s if event_s is None else min(event_s, tick_s)

    def _walk_stretch(self) -> tuple[int, float]:
        """How many of the planned steps there will be if nothing comes, and the time after them."""
        limit_s, now_s, last_end_s = self._get_limit_s(), self.now_s, self._last_end_s
        depth = self.scheduler.config.max_steps_in_flight
        ends_s = [end_s for _, _, end_s in self._in_flight]
        first, num_steps = 0, 0
        for cost_s in self._stretch:
            if now_s >= limit_s:
                break
            last_end_s = max(now_s, last_end_s) + cost_s
            ends_s.append(last_end_s)
            if len(ends_s) - first == depth:
                now_s = ends_s[first]
                first += 1
            num_steps += 1
        return num_steps, now_s

    def _end_stretch(self, now_s: float) -> None:
        """Carry out the planned stretch, its steps that start before `now_s`."""
        costs_s, self._stretch = self._stretch, []
        before_s = max(self.now_s, self._last_end_s)
        next_s = min(now_s, self._get_limit_s())
        if self._run_stretch(len(costs_s), next_s, iter(costs_s)):
            self.busy_s += self._last_end_s - before_s

    def _start_answer(self, turn: LiveTurn) -> None:
        self._listener.on_first_token(self, turn)

    def _finish_turn(self, turn_id: str) -> None:
        self._listener.on_finished(self, self._turns.pop(turn_id))


def insert_kv(kv: KvCache, request: Request, num_tokens: int) -> bool:
    """Cache the first tokens of a request as if they had been computed. False if there is no room."""
    kv.enter(request)
    hit = kv.get_hit(request)
    num_new_tokens = num_tokens - hit.num_tokens
    if num_new_tokens <= 0:
        return True
    if not kv.try_allocate(request, num_new_tokens, hit, is_busy=True):
        return False
    kv.free(request)
    return True
