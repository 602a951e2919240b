"""The simulated engine of the server: requests come and go while it runs.

`advance` gets the current time and handles every event that is due by then, each at its own simulated time.
If the process was busy when a step should have ended, the step still ends at the right simulated time,
and the next one starts there. So simulated time never drifts.

`tenuto.sim.simulation` does the same for a workload that is known in advance. Both use the same scheduler and
step cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tenuto.core.errors import ConfigError
from tenuto.core.steps import StepClock
from tenuto.sim.cost.batch import StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.request import Request, Status
from tenuto.sim.server.stats import EngineStats


@dataclass(slots=True, eq=False)
class ServedRequest(Request):
    """A request, with the reason why its answer ends."""

    ends_by: Literal["stop", "length"] = field(default="length", kw_only=True)


@dataclass(slots=True, eq=False)
class ServedTurn:
    """One request in the engine. Times are seconds on the engine's clock."""

    request: ServedRequest
    arrival_s: float
    on_news: Callable[[], None]
    """Called when the turn has new tokens, or an error."""
    num_tokens: int = 0
    """Output tokens so far."""
    start_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_hit_tokens: int = 0
    """Prompt tokens that were served from the KV cache when the request first started."""
    is_finished: bool = False
    error: Exception | None = None


class _Message(NamedTuple):
    at_s: float
    turn: ServedTurn
    is_abort: bool


class _StepInFlight(NamedTuple):
    step: Step
    scheduled_s: float
    end_s: float


class Engine:
    """One simulated engine. It has no clock: callers pass the time in."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_cost: StepCost,
        *,
        now_s: float = 0.0,
        on_step: Callable[[Step, float], None] | None = None,
    ) -> None:
        """`on_step` is called with each step when it is scheduled, and with the time."""
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.now_s = now_s
        """All events until this time have been handled."""
        self.num_finished_steps = 0
        self._step_cost = step_cost
        self._on_step = on_step
        self._inbox: deque[_Message] = deque()
        self._turns: dict[str, ServedTurn] = {}
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_end_s = now_s
        self._waits_for_step = False
        self._step_clock = StepClock(now_s)

    @property
    def num_turns(self) -> int:
        """Number of requests that arrived and have not ended."""
        return len(self._turns)

    def submit(self, request: ServedRequest, on_news: Callable[[], None]) -> ServedTurn:
        """Take a request at its arrival time; times must not decrease."""
        turn = ServedTurn(request, request.arrival_s, on_news)
        self._turns[request.turn_id] = turn
        self._inbox.append(_Message(request.arrival_s, turn, is_abort=False))
        return turn

    def abort(self, turn: ServedTurn, now_s: float) -> None:
        """End a turn because its client disconnected. No effect if the turn is done."""
        if self._turns.pop(turn.request.turn_id, None) is not None:
            self._inbox.append(_Message(now_s, turn, is_abort=True))

    def fail(self, error: Exception) -> None:
        """Mark the engine as failed: every unfinished turn gets the error."""
        for turn in self._turns.values():
            turn.error = error
            turn.on_news()
        self._turns.clear()

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content. While requests run, returns False and keeps the content."""
        return self.scheduler.reset_prefix_cache(self.now_s)

    def advance(self, until_s: float) -> float | None:
        """Handle the events that are due by `until_s`, but at most one end of a step.

        Returns the time of the next event; it is before `until_s` if more events are already due. None if
        nothing happens until a request arrives.
        """
        while not self._waits_for_step:
            self._take_messages(self.now_s, inclusive=True)
            step = self._schedule()
            if not step.num_tokens and not self._in_flight:
                next_s = self._get_next_event_s()
                if next_s is not None and next_s <= until_s:
                    self.now_s = max(self.now_s, next_s)
                return next_s
            is_full = len(self._in_flight) == self.scheduler.config.max_steps_in_flight
            self._waits_for_step = is_full or not step.num_tokens
        end_s = self._in_flight[0].end_s
        self._take_messages(end_s, inclusive=False)
        if end_s <= until_s:
            self._finish_oldest()
        return end_s

    def count_in_flight(self) -> int:
        """Steps that were scheduled and have not ended."""
        return len(self._in_flight)

    # Steps.

    def _schedule(self) -> Step:
        step = self.scheduler.schedule(self.now_s)
        for turn_id, num_hit_tokens in step.new.items():
            turn = self._turns.get(turn_id)
            if turn is not None:
                turn.start_s, turn.num_hit_tokens = self.now_s, num_hit_tokens
                self.stats.num_queried_tokens += turn.request.num_prompt_tokens
                self.stats.num_hit_tokens += num_hit_tokens
        self.stats.num_preemptions += len(step.preempted)
        if step.num_tokens:
            self.stats.step_tokens.observe(sum(step.num_tokens.values()))
            computed_s = max(self.now_s, self._last_end_s) + self._step_cost.seconds(step.batch)
            computed_s += step.copies_s
            self._last_end_s = max(computed_s, step.copies_done_s)
            self._in_flight.append(_StepInFlight(step, self.now_s, self._last_end_s))
            if self._on_step is not None:
                self._on_step(step, self.now_s)
        return step

    def _finish_oldest(self) -> None:
        step, scheduled_s, end_s = self._in_flight.popleft()
        self._waits_for_step = False
        self.now_s = end_s
        self.num_finished_steps += 1
        if self.scheduler.driver.hears_steps:
            self._tell_step(step, scheduled_s, end_s)
        for request, num_new_tokens in self.scheduler.finish_step(step, end_s):
            turn = self._turns.get(request.turn_id)
            if turn is not None:
                self._count_tokens(turn, num_new_tokens)
                if request.status is Status.FINISHED:
                    self._finish_turn(turn)
                turn.on_news()

    def _tell_step(self, step: Step, scheduled_s: float, end_s: float) -> None:
        num_tokens = sum(step.num_tokens.values()) - sum(step.num_drafts.values())
        num_requests, is_full = len(step.num_tokens), step.budget == 0
        view = self._step_clock.finish(end_s, scheduled_s, num_tokens, num_requests, is_full=is_full)
        self.scheduler.driver.step(view)

    # Turns.

    def _take_messages(self, now_s: float, *, inclusive: bool) -> None:
        inbox = self._inbox
        while inbox and (inbox[0].at_s < now_s or (inclusive and inbox[0].at_s == now_s)):
            at_s, turn, is_abort = inbox.popleft()
            if is_abort:
                self.scheduler.abort(turn.request.turn_id, at_s)
                self.stats.num_finished["abort"] += 1
                continue
            try:
                self.scheduler.add_request(turn.request, at_s)
            except ConfigError as error:
                turn.error = error
                self.stats.num_finished["error"] += 1
                self._turns.pop(turn.request.turn_id, None)
                turn.on_news()

    def _count_tokens(self, turn: ServedTurn, num_new_tokens: int) -> None:
        stats = self.stats
        stats.num_output_tokens += num_new_tokens
        if turn.num_tokens == 0:
            turn.first_token_s = self.now_s
            stats.num_prompt_tokens += turn.request.num_prompt_tokens
            stats.first_token_s.observe(self.now_s - turn.arrival_s)
        else:
            stats.between_tokens_s.observe(self.now_s - turn.last_token_s)
        turn.last_token_s = self.now_s
        turn.num_tokens += num_new_tokens

    def _finish_turn(self, turn: ServedTurn) -> None:
        del self._turns[turn.request.turn_id]
        turn.is_finished = True
        stats, request = self.stats, turn.request
        stats.num_finished[request.ends_by] += 1
        stats.latency_s.observe(self.now_s - turn.arrival_s)
        stats.queue_s.observe(turn.start_s - turn.arrival_s)
        stats.inference_s.observe(self.now_s - turn.start_s)
        stats.prefill_s.observe(turn.first_token_s - turn.start_s)
        stats.decode_s.observe(self.now_s - turn.first_token_s)
        if turn.num_tokens > 1:
            stats.per_token_s.observe((self.now_s - turn.first_token_s) / (turn.num_tokens - 1))
        stats.prompt_tokens.observe(request.num_prompt_tokens)
        stats.output_tokens.observe(turn.num_tokens)

    def _get_next_event_s(self) -> float | None:
        times_s = [self._inbox[0].at_s] if self._inbox else []
        event_s = self.scheduler.get_next_event_s()
        if event_s is not None:
            times_s.append(event_s)
        return min(times_s, default=None)
