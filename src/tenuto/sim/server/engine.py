"""The simulated engine of the server, and the task that advances it with a clock.

    handlers ─ submit, abort ─► ServedEngine ─► EventLoop ─► SteppedEngine        as in a simulation
                                     ▲
                 Clock ─► Pacer ─ advance          every event that is due by now, at its own simulated time

If the process was busy when a step should have ended, the step still ends at the right simulated time, and
the next one starts there. So simulated time never drifts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tenuto.core.errors import ConfigError
from tenuto.core.stats import Histogram
from tenuto.records.trace import TraceWriter
from tenuto.sim.cost.batch import StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.event_loop import EventLoop, SteppedEngine
from tenuto.sim.kv.request import Request, Status

WARN_LAG_S = 1.0
"""The log warns at this lag in real seconds, and again each time the lag has doubled."""
MAX_BUSY_S = 0.05
"""Real seconds for which the engine may block the event loop at a time."""

logger = logging.getLogger("tenuto.sim")

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@dataclass
class EngineStats:
    """Counters for `/metrics`: totals since the start. Times are simulated seconds, except `lag_s`."""

    num_prompt_tokens: int = 0
    """Prompt tokens of turns that have produced their first token."""
    num_output_tokens: int = 0
    num_queried_tokens: int = 0
    """Prompt tokens of requests that started, counted at their first start."""
    num_hit_tokens: int = 0
    """The part of `num_queried_tokens` that was found in the KV cache."""
    num_preemptions: int = 0
    num_finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    first_token_s: Histogram = field(default_factory=partial(Histogram, _FIRST_TOKEN_S))
    between_tokens_s: Histogram = field(default_factory=partial(Histogram, _PER_TOKEN_S))
    per_token_s: Histogram = field(default_factory=partial(Histogram, _PER_TOKEN_S))
    """The mean time between a request's tokens, one value per request."""
    latency_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    queue_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    inference_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    prefill_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    decode_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    output_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    step_tokens: Histogram = field(default_factory=partial(Histogram, _STEP_TOKENS))
    lag_s: Histogram = field(default_factory=partial(Histogram, _LAG_S))
    """Real seconds by which a step ended later than it should have."""


@dataclass(slots=True, eq=False)
class ServedRequest(Request):
    """A request, with the reason why its answer ends."""

    ends_by: Literal["stop", "length"] = field(default="length", kw_only=True)


@dataclass(slots=True, eq=False)
class ServedTurn:
    """One request in the engine. Times are seconds on the engine's clock."""

    request: ServedRequest
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


class ServedEngine:
    """One simulated engine whose requests come and go while it runs. Callers pass the time in."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_cost: StepCost,
        *,
        now_s: float = 0.0,
        on_step: Callable[[SteppedEngine, Step], None] | None = None,
    ) -> None:
        """`on_step`: see `SteppedEngine`."""
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.num_finished_steps = 0
        self._engine = SteppedEngine(None, scheduler, step_cost, self, now_s=now_s, fast_forwards=False)
        self._engine.on_step = on_step
        self._loop = EventLoop(now_s)
        self._loop.plan(self._engine)
        self._turns: dict[str, ServedTurn] = {}

    @property
    def now_s(self) -> float:
        """The time up to which all events have been handled."""
        return self._loop.now_s

    @property
    def num_turns(self) -> int:
        """Number of requests that arrived and have not ended."""
        return len(self._turns)

    def submit(self, request: ServedRequest, on_news: Callable[[], None]) -> ServedTurn:
        """Take a request at its arrival time; times must not decrease."""
        turn = ServedTurn(request, on_news)
        self._turns[request.turn_id] = turn
        self._loop.add(request.arrival_s, lambda: self._arrive(turn))
        return turn

    def abort(self, turn: ServedTurn, now_s: float) -> None:
        """End a turn because its client disconnected. No effect if the turn is done."""
        if self._turns.pop(turn.request.turn_id, None) is not None:
            self._loop.add(now_s, lambda: self._leave(turn))

    def fail(self, error: Exception) -> None:
        """Mark the engine as failed: every unfinished turn gets the error."""
        for turn in self._turns.values():
            turn.error = error
            turn.on_news()
        self._turns.clear()

    def pass_time(self, now_s: float) -> None:
        """Let the engine's time be this, once due events are handled, although nothing happens then."""
        self._loop.add(max(self.now_s, now_s), lambda: None)

    def look_again(self) -> None:
        """Look for work now, because something has changed from outside."""
        self._engine.wake_if_idle(self.now_s)
        self._loop.plan(self._engine)

    def advance(self, until_s: float) -> float | None:
        """Handle the events that are due by `until_s`, but at most one end of a step.

        Returns the time of the next event; it is before `until_s` if more events are already due. None if
        nothing happens until a request arrives.
        """
        num_steps = self.num_finished_steps
        while (wake := self._loop.get_next()) is not None:
            if wake.at_s > until_s or self.num_finished_steps > num_steps:
                return wake.at_s
            self._loop.step()
        return None

    def count_in_flight(self) -> int:
        """Steps that were scheduled and have not ended."""
        return self._engine.count_in_flight()

    # Turns.

    def _arrive(self, turn: ServedTurn) -> None:
        try:
            self._engine.add_request(turn.request, self.now_s)
        except ConfigError as error:
            turn.error = error
            self.stats.num_finished["error"] += 1
            self._turns.pop(turn.request.turn_id, None)
            turn.on_news()
        self._loop.plan(self._engine)

    def _leave(self, turn: ServedTurn) -> None:
        self._engine.abort(turn.request.turn_id, self.now_s)
        self.stats.num_finished["abort"] += 1
        self._loop.plan(self._engine)

    # Events of the engine.

    def on_scheduled(self, engine: SteppedEngine, step: Step) -> None:
        """Turns start."""
        for turn_id, num_hit_tokens in step.new.items():
            turn = self._turns.get(turn_id)
            if turn is not None:
                turn.start_s, turn.num_hit_tokens = engine.now_s, num_hit_tokens
                self.stats.num_queried_tokens += turn.request.num_prompt_tokens
                self.stats.num_hit_tokens += num_hit_tokens
        self.stats.num_preemptions += len(step.preempted)
        if step.num_tokens:
            self.stats.step_tokens.observe(sum(step.num_tokens.values()))

    def on_computed(self, engine: SteppedEngine, outputs: Sequence[tuple[Request, int]]) -> None:
        """Turns get tokens, and finish."""
        self.num_finished_steps += 1
        for request, num_new_tokens in outputs:
            turn = self._turns.get(request.turn_id)
            if turn is not None:
                self._count_tokens(turn, num_new_tokens, engine.now_s)
                if request.status is Status.FINISHED:
                    self._finish(turn, engine.now_s)
                turn.on_news()

    def on_decoded(self, engine: SteppedEngine, requests: Sequence[Request], ends_s: Sequence[float]) -> None:
        """Never called: each step's tokens are sent when it ends."""

    def _count_tokens(self, turn: ServedTurn, num_new_tokens: int, now_s: float) -> None:
        stats = self.stats
        stats.num_output_tokens += num_new_tokens
        if turn.num_tokens == 0:
            turn.first_token_s = now_s
            stats.num_prompt_tokens += turn.request.num_prompt_tokens
            stats.first_token_s.observe(now_s - turn.request.arrival_s)
        else:
            stats.between_tokens_s.observe(now_s - turn.last_token_s)
        turn.last_token_s = now_s
        turn.num_tokens += num_new_tokens

    def _finish(self, turn: ServedTurn, now_s: float) -> None:
        del self._turns[turn.request.turn_id]
        turn.is_finished = True
        stats, request = self.stats, turn.request
        stats.num_finished[request.ends_by] += 1
        stats.latency_s.observe(now_s - request.arrival_s)
        stats.queue_s.observe(turn.start_s - request.arrival_s)
        stats.inference_s.observe(now_s - turn.start_s)
        stats.prefill_s.observe(turn.first_token_s - turn.start_s)
        stats.decode_s.observe(now_s - turn.first_token_s)
        if turn.num_tokens > 1:
            stats.per_token_s.observe((now_s - turn.first_token_s) / (turn.num_tokens - 1))
        stats.prompt_tokens.observe(request.num_prompt_tokens)
        stats.output_tokens.observe(turn.num_tokens)


class Clock:
    """A clock that runs `speed` times as fast as the machine's monotonic clock, from its creation on."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._start_s = time.monotonic()

    def get_now_s(self) -> float:
        """Return the simulated time in seconds. At speed 1 it equals the machine's clock."""
        return self._start_s + (time.monotonic() - self._start_s) * self.speed

    def get_real_duration_s(self, duration_s: float) -> float:
        """Return how many real seconds the given simulated seconds take."""
        return duration_s / self.speed


class Pacer:
    """Advances an engine to the clock's time repeatedly. Everything runs in one event loop."""

    def __init__(self, engine: ServedEngine, clock: Clock, trace: TraceWriter | None = None) -> None:
        self.engine = engine
        self.clock = clock
        self.trace = trace
        self.error: Exception | None = None
        """The error that ended the engine, or None."""
        self.may_run = asyncio.Event()
        """Not set while the trace is not open yet: its records begin with the engine's first."""
        self.may_run.set()
        self._news = asyncio.Event()
        self._warn_lag_s = WARN_LAG_S

    def submit(self, request: ServedRequest, on_news: Callable[[], None]) -> ServedTurn:
        """Submit a request that arrives now. If the engine has failed, raises its error."""
        if self.error is not None:
            raise self.error
        request.arrival_s = self.clock.get_now_s()
        turn = self.engine.submit(request, on_news)
        self._news.set()
        return turn

    def abort(self, turn: ServedTurn) -> None:
        """End a turn because its client disconnected. No effect if the turn is done."""
        self.engine.abort(turn, self.clock.get_now_s())
        self._news.set()

    def catch_up(self) -> None:
        """Handle due events, so that the engine's time is the clock's, before a look or a change."""
        if self.error is not None or not self.may_run.is_set():
            return
        self.engine.pass_time(self.clock.get_now_s())
        try:
            self._handle_due_events()
        except Exception as error:
            self._fail(error)

    def wake(self) -> None:
        """Handle due events at once, because something has changed from outside."""
        self.engine.look_again()
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled, or until the engine fails; then every waiting turn gets the error."""
        await self.may_run.wait()
        try:
            while self.error is None:
                await self._advance()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.error("the simulated engine has ended", exc_info=error)
        self.error = error
        self.engine.fail(error)

    async def _advance(self) -> None:
        next_s = self._handle_due_events()
        timer = None
        if next_s is not None:
            delay_s = self.clock.get_real_duration_s(next_s - self.clock.get_now_s())
            if delay_s <= 0:
                # More events are due, but first the handlers send the tokens that are ready.
                await asyncio.sleep(0)
                return
            timer = asyncio.get_running_loop().call_later(delay_s, self._news.set)
        if self.trace is not None and not self.engine.count_in_flight():
            self.trace.flush()  # no step will do it
        await self._news.wait()
        self._news.clear()
        if timer is not None:
            timer.cancel()

    def _handle_due_events(self) -> float | None:
        """Handle due events for `MAX_BUSY_S` at most. Returns the time of the next event, or None.

        Handlers cannot send during this time. So if sending is slow, several tokens are sent at a time, and
        the engine does not lag.
        """
        now_s = self.clock.get_now_s()
        limit_s = now_s + self.clock.speed * MAX_BUSY_S
        while True:
            num_steps = self.engine.num_finished_steps
            next_s = self.engine.advance(now_s)
            if self.engine.num_finished_steps > num_steps:
                lag_s = self.clock.get_real_duration_s(self.clock.get_now_s() - self.engine.now_s)
                self.engine.stats.lag_s.observe(lag_s)
                if lag_s > self._warn_lag_s:
                    self._warn_lag_s = 2 * lag_s
                    late = "%.1f s late: this machine is busy, or too slow for speed %g"
                    logger.warning(late, lag_s, self.clock.speed)
            if next_s is None or next_s > now_s or self.clock.get_now_s() > limit_s:
                return next_s
