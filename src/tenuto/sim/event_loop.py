"""The event loop: handles the events of one engine, of a fleet, or of a server's engine in order of time.

    EventLoop.step()    the earliest event:
        SENDS           a client sends a turn; a fault, a look at the metrics
        ENDS            an engine's step ends: its requests get their tokens
        STARTS          an engine schedules its next step

A simulation calls `step` until no event is left. A server calls it for events that are due by its clock. An
engine never runs ahead of events that may still come: it says when it wants to be woken next, and a turn that
comes earlier is delivered in time. With two steps in flight, the second is scheduled while the first runs, as
in vLLM's batch queue (vllm/v1/engine/core.py:step_with_batch_queue@0.32).
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tenuto.core.engine import StepClock
from tenuto.sim.cost.batch import StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.kv.request import Request

ENDS, SENDS, STARTS = 0, 1, 2
"""At one moment, steps end first, then turns are sent, then steps are scheduled."""
MAX_PLANNED_STEPS = 64
"""Most steps of a planned stretch. If a turn comes before its end, planning the rest was wasted."""
FIRST_PRICED, MOST_PRICED = 16, 1024
"""First and largest number of steps of a stretch that are priced at once. Prices beyond its end are
wasted."""


class Wake(NamedTuple):
    """When something happens, and its place among the events of that moment."""

    at_s: float
    place: int


class EventLoop:
    """All coming events. Events of one moment are ordered by their place, then by when they were added.

    Of each engine only the next wake is queued, and none of the engine that stepped last, which usually comes
    first again. So the cost of a run grows with the steps and turns of all engines, not with their number.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._heap: list[tuple[float, int, int, Callable[[], SteppedEngine | None]]] = []
        self._num_added = 0
        self._stepping: SteppedEngine | None = None

    def add(self, at_s: float, act: Callable[[], None]) -> None:
        """Add an event other than an engine's step."""
        self._push(at_s, SENDS, act)

    def plan(self, engine: SteppedEngine) -> None:
        """Queue an engine's next wake, because something has happened to it."""
        wake = engine.next_wake
        if wake is None or wake == engine.planned_wake or engine is self._stepping:
            return
        engine.planned_wake = wake

        def act() -> SteppedEngine | None:
            if engine.planned_wake != wake:
                return None
            engine.planned_wake = None
            return self._wake(engine, wake) if engine.next_wake == wake else None

        self._push(*wake, act)

    def has_next(self) -> bool:
        """Whether anything will happen."""
        return bool(self._heap) or (self._stepping is not None and self._stepping.next_wake is not None)

    def get_next(self) -> Wake | None:
        """The time of the next event; None if there is none."""
        wake = None if self._stepping is None else self._stepping.next_wake
        if not self._heap:
            return wake
        at_s, place, *_ = self._heap[0]
        return Wake(at_s, place) if wake is None or (at_s, place) <= wake else wake

    def step(self) -> SteppedEngine | None:
        """Handle the next event; there must be one. Returns the engine that was woken, if one was."""
        engine = self._stepping
        if engine is not None:
            wake = engine.next_wake
            if wake is not None and (not self._heap or wake <= self._heap[0][:2]):
                return self._wake(engine, wake)
            self._stepping = None
            self.plan(engine)
        self.now_s, _, _, act = heapq.heappop(self._heap)
        return act()

    def _push(self, at_s: float, place: int, act: Callable[[], SteppedEngine | None]) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (at_s, place, self._num_added, act))

    def _wake(self, engine: SteppedEngine, wake: Wake) -> SteppedEngine:
        self.now_s, self._stepping = wake.at_s, engine
        if self._heap:
            at_s, place, *_ = self._heap[0]
            engine.wake(at_s, plans=place != SENDS)
        else:
            engine.wake(math.inf)
        if engine.next_wake is None or (self._heap and self._heap[0][:2] <= engine.next_wake):
            self._stepping = None
            self.plan(engine)
        return engine


class Listener(Protocol):
    """Receives the events of an engine's requests. The time is the engine's."""

    def on_scheduled(self, engine: SteppedEngine, step: Step) -> None:
        """A step was scheduled; if it is empty, it does not run."""

    def on_computed(self, engine: SteppedEngine, outputs: Sequence[tuple[Request, int]]) -> None:
        """A step ended: these requests got this many tokens each, and some are finished."""

    def on_decoded(self, engine: SteppedEngine, requests: Sequence[Request], ends_s: Sequence[float]) -> None:
        """Steps ended at these times. Each gave each of these requests a token that is not its last."""


class SteppedEngine:
    """A scheduler with a clock. Its owner calls `wake` at `next_wake`, which may change before that."""

    def __init__(
        self,
        name: str | None,
        scheduler: Scheduler,
        step_cost: StepCost,
        listener: Listener,
        *,
        now_s: float = 0.0,
        fast_forwards: bool = True,
    ) -> None:
        """The engine exists from `now_s` on. A first, empty step starts its policy's clock."""
        self.name = name
        self.scheduler = scheduler
        self.now_s = now_s
        self.num_steps = 0
        self.busy_s = 0.0
        """Seconds in which a step ran."""
        self.next_wake: Wake | None = Wake(now_s, STARTS)
        """None while it has nothing to do."""
        self.planned_wake: Wake | None = None
        """The wake that the event loop has queued."""
        self.fast_forwards = fast_forwards
        """Whether a stretch of steps without events is advanced in one piece. The result is the same."""
        self.joins_stretches = False
        """Whether a step follows another one at once, if no turn finished, and a stretch another stretch,
        although a lease expired or gave up blocks, or the policy was told of a tick. The result is the same,
        but the engine wakes less often."""
        self.on_step: Callable[[SteppedEngine, Step], None] | None = None
        """Called with each scheduled step, except for steps of a stretch."""
        self._step_cost = step_cost
        self._listener = listener
        self._in_flight: deque[tuple[Step, float, float]] = deque()
        """Each step in flight, with the times at which it was scheduled and will end."""
        self._last_step: Step | None = None
        self._last_end_s = now_s
        self._step_clock = StepClock(now_s)
        self._stretch: list[float] = []
        """Seconds of each step of the planned stretch."""

    # What the loop calls.

    def wake(self, horizon_s: float = -math.inf, *, plans: bool = False) -> None:
        """Do the work that is due at `next_wake`. No event comes from outside before `horizon_s`.

        `plans`: at the horizon another engine steps, which may not affect this one, so plan beyond it.
        """
        assert self.next_wake is not None
        at_s, place = self.next_wake
        if self._stretch:
            self._end_stretch(math.inf)
        if place == ENDS:
            num_requests = len(self.scheduler.state.requests)
            self._end_step()
            has_finished = len(self.scheduler.state.requests) < num_requests
            if has_finished or not self.joins_stretches or self.now_s >= horizon_s:
                # Other events of this moment, such as the next turn of a job that has no pause, come first.
                self.next_wake = Wake(self.now_s, STARTS)
                return
        self.now_s = max(self.now_s, at_s)
        self.next_wake = self._schedule_on(horizon_s, plans=plans)

    # What comes from outside.

    def add_request(self, request: Request, now_s: float) -> None:
        """A turn comes in. Raises ConfigError if it can never run here."""
        self.catch_up(now_s)
        self.scheduler.add_request(request, now_s)
        self.wake_if_idle(now_s)

    def abort(self, turn_id: str, now_s: float) -> None:
        """The connection of a turn broke; nothing happens if the turn is done."""
        self.catch_up(now_s)
        # The last step of a stretch is counted whole, although it ends later: it gave each turn a token.
        self.scheduler.abort(turn_id, now_s, num_early_tokens=int(self.now_s > now_s))
        self._last_step = None
        self.wake_if_idle(now_s)

    def insert_kv(self, request: Request, num_tokens: int, now_s: float) -> bool:
        """KV of a prompt's first tokens came from another engine. False if there was no room for it."""
        self.catch_up(now_s)
        kv = self.scheduler.kv
        kv.enter(request)
        hit = kv.get_hit(request)
        num_new_tokens = num_tokens - hit.num_tokens
        if num_new_tokens <= 0:
            return True
        if not kv.try_allocate(request, num_new_tokens, hit, is_busy=True):
            return False
        kv.free(request)
        return True

    def catch_up(self, now_s: float) -> None:
        """Carry out the plan until `now_s`, before an event from outside."""
        if self._stretch:
            self._end_stretch(now_s)
            self.next_wake = Wake(self.now_s, STARTS)
        elif self.next_wake is None:
            self.now_s = max(self.now_s, now_s)

    def wake_if_idle(self, now_s: float) -> None:
        """Look for work now if no step runs, because something has changed."""
        if not self._in_flight and (self.next_wake is None or self.next_wake.at_s > now_s):
            self.next_wake = Wake(max(self.now_s, now_s), STARTS)

    def count_in_flight(self) -> int:
        """Steps that were scheduled and have not ended."""
        return len(self._in_flight)

    # Steps.

    def _schedule_on(self, horizon_s: float, *, plans: bool) -> Wake | None:
        """Schedule steps until there is something to wait for."""
        while True:
            if self._pass_stretch(horizon_s, plans=plans):
                if self._stretch:
                    return Wake(self._walk_stretch()[1], STARTS)
                if self._is_full:
                    return Wake(self._in_flight[0][2], ENDS)
                if self.now_s >= horizon_s:
                    return Wake(self.now_s, STARTS)
                continue
            step = self._schedule()
            if self._is_full or (self._in_flight and not step.num_tokens):
                return Wake(self._in_flight[0][2], ENDS)
            if not step.num_tokens and not step.preempted:
                # After a preemption, other turns can be scheduled at once, as in vLLM's next step.
                event_s = self.scheduler.get_next_event_s()
                return None if event_s is None else Wake(event_s, STARTS)

    def _schedule(self) -> Step:
        step = self.scheduler.schedule(self.now_s)
        self._listener.on_scheduled(self, step)
        self._last_step = step
        if step.num_tokens:
            self._launch(step)
            if self.on_step is not None:
                self.on_step(self, step)
        return step

    def _launch(self, step: Step) -> None:
        """Let a step run, after those in flight."""
        self.num_steps += 1
        begin_s = max(self.now_s, self._last_end_s)
        end_s = begin_s + self._step_cost.seconds(step.batch) + step.copies_s
        self._last_end_s = max(end_s, step.copies_done_s)
        self.busy_s += self._last_end_s - begin_s
        self._in_flight.append((step, self.now_s, self._last_end_s))

    @property
    def _is_full(self) -> bool:
        """Whether no more steps may be scheduled before one ends."""
        return len(self._in_flight) == self.scheduler.config.max_steps_in_flight

    def _end_step(self) -> None:
        """The oldest step in flight ends."""
        step = self._land()
        self._listener.on_computed(self, self.scheduler.finish_step(step, self.now_s))

    def _land(self) -> Step:
        """The oldest step in flight ends, and the policy is told. Its results come next."""
        step, scheduled_s, self.now_s = self._in_flight.popleft()
        if self.scheduler.driver.hears_steps:
            self._report_step(step, scheduled_s, self.now_s)
        return step

    def _report_step(self, step: Step, scheduled_s: float, end_s: float) -> None:
        """Tell the policy about a step, just before the step's results."""
        num_tokens = sum(step.num_tokens.values()) - sum(step.num_drafts.values())
        num_requests, is_full = len(step.num_tokens), step.budget == 0
        view = self._step_clock.finish(end_s, scheduled_s, num_tokens, num_requests, is_full=is_full)
        self.scheduler.driver.step(view)

    # Stretches: see `Scheduler`.

    def _pass_stretch(self, horizon_s: float, *, plans: bool) -> bool:
        """Run steps of a stretch until the horizon, and plan those after it. False if the next is none."""
        last = self._last_step
        if not self.fast_forwards or last is None or not (last.chunks or last.is_decode_only):
            return False
        scheduler, limit_s = self.scheduler, self._get_limit_s()
        # What a step does before it computes is done as in any step. If no turn can start then, the step and
        # those after it are as those before.
        joins = self.joins_stretches and not scheduler.needs_each_step
        if self.now_s >= limit_s:
            if not joins:
                return False
            scheduler.begin_step(self.now_s)
            limit_s = self._get_limit_s()
        if last.chunks:
            return joins and self._run_chunk_steps(min(horizon_s, limit_s))
        num_steps = scheduler.count_quiet_steps(self.now_s if joins else None)
        if num_steps < (1 if joins else 2):  # not worth a stretch
            return False
        num_run = self._run_stretch(num_steps, min(horizon_s, limit_s))
        if plans and num_run < num_steps and self.now_s >= horizon_s:
            self._stretch = self._price(0, min(num_steps - num_run, MAX_PLANNED_STEPS))
            del self._stretch[self._walk_stretch()[0] :]
        return num_run > 0 or bool(self._stretch)

    def _run_chunk_steps(self, until_s: float) -> bool:
        """Schedule chunk steps, and end those that end before `until_s`. False if another kind comes next."""
        steps = self.scheduler.find_chunk_steps() if self.now_s < until_s else None
        if steps is None:
            return False
        ends_s: list[float] = []
        step: Step | None = None
        while self.now_s < until_s and steps.num_scheduled < steps.most:
            step = self.scheduler.schedule_chunk(steps, self.now_s)
            if step is None:
                break
            self._last_step = step
            self._launch(step)
            if self._is_full:
                if self._in_flight[0][2] >= until_s:
                    break
                self._land()
                ends_s.append(self.now_s)
        if steps.num_scheduled:
            if ends_s and steps.decoding:
                self._listener.on_decoded(self, steps.decoding, ends_s)
            self.scheduler.end_chunk_steps(steps, len(ends_s), [each for each, *_ in self._in_flight])
        return step is not None

    def _price(self, first: int, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` quiet steps, from number `first` of the coming ones."""
        running = self.scheduler.state.running
        num_context_tokens = sum([request.num_computed_tokens for request in running]) + first * len(running)
        return self._step_cost.price_stretch(len(running), num_context_tokens, num_steps)

    def _get_limit_s(self) -> float:
        """The time of the next event other than a step."""
        event_s, tick_s = self.scheduler.get_next_event_s(), self.scheduler.driver.get_next_tick_s()
        return tick_s if event_s is None else min(event_s, tick_s)

    def _run_stretch(self, num_quiet_steps: int, until_s: float, costs_s: Sequence[float] = ()) -> int:
        """Advance by quiet steps until `until_s` at least. Returns how many there were.

        `costs_s`: seconds of each, if they are known.

            ends_s    │ before │ quiet steps ……… │      before: of the steps in flight
                        ●        ●   ●   ●   ●          with two in flight, each step is scheduled
                              ↑   ↑   ↑   ↑             when the last but one ends
        """
        if self.now_s >= until_s:
            return 0
        assert self._last_step is not None
        scheduler, in_flight = self.scheduler, self._in_flight
        num_before, num_beside = len(in_flight), scheduler.config.max_steps_in_flight - 1
        begin_s = max(self.now_s, self._last_end_s)
        ends_s = [end_s for _, _, end_s in in_flight]
        if costs_s:
            ends_s += _add_up(begin_s, costs_s)
        else:
            self._price_until(ends_s, begin_s, num_quiet_steps, until_s)
        # A step that would be scheduled at `until_s` or later is not run.
        num_steps = min(num_quiet_steps, bisect_left(ends_s, until_s) + 1 + num_beside - num_before)
        del ends_s[num_before + num_steps :]
        num_ended = max(0, len(ends_s) - num_beside)
        scheduled_s = [self.now_s] * (1 + num_beside - num_before) + ends_s
        # They count as full as the last step: nothing has changed for a policy that bounds steps.
        step = Step(self._last_step.budget, 0, {request.turn_id: 1 for request in scheduler.state.running})
        ended = [in_flight.popleft() for _ in range(min(num_before, num_ended))]
        first = num_ended - len(ended)
        for number in range(first, num_steps):
            in_flight.append((step, scheduled_s[number], ends_s[num_before + number]))
        if scheduler.driver.hears_steps:
            for each in ended:
                self._report_step(*each)
            if first:
                told_s, is_full = ends_s[num_before:num_ended], step.budget == 0
                scheduler.driver.decode(
                    self._step_clock.finish_decodes(
                        told_s, scheduled_s[0], len(step.num_tokens), is_full=is_full
                    )
                )
        self.busy_s += ends_s[-1] - begin_s
        self.num_steps += num_steps
        self._last_end_s = ends_s[-1]
        del ends_s[num_ended:]
        if ends_s:
            self.now_s = ends_s[-1]
            self._listener.on_decoded(self, scheduler.state.running, ends_s)
        scheduler.run_quiet_steps(num_steps)
        return num_steps

    def _price_until(self, ends_s: list[float], begin_s: float, num_steps: int, until_s: float) -> None:
        """Append the ends of quiet steps from `begin_s` on, until one reaches `until_s` or all are done."""
        num_beside, num_priced, num_next = self.scheduler.config.max_steps_in_flight - 1, 0, FIRST_PRICED
        while num_priced < num_steps:
            costs_s = self._price(num_priced, min(num_next, num_steps - num_priced))
            ends_s += _add_up(begin_s, costs_s)
            num_priced, begin_s = num_priced + len(costs_s), ends_s[-1]
            if num_priced > num_beside and ends_s[-1 - num_beside] >= until_s:
                return
            num_left = (until_s - begin_s) / costs_s[-1] if costs_s[-1] > 0 else MOST_PRICED
            num_next = math.ceil(min(max(num_left + num_beside + 1, FIRST_PRICED), MOST_PRICED))

    def _walk_stretch(self) -> tuple[int, float]:
        """The number of planned steps that will run if no event comes, and the time after them."""
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
        """Carry out the steps of the planned stretch that start before `now_s`."""
        costs_s, self._stretch = self._stretch, []
        self._run_stretch(len(costs_s), min(now_s, self._get_limit_s()), costs_s)


def _add_up(begin_s: float, costs_s: Sequence[float]) -> Iterator[float]:
    """The end of each of these steps, which run one after the other."""
    ends_s = itertools.accumulate(costs_s, initial=begin_s)
    next(ends_s)
    return ends_s
