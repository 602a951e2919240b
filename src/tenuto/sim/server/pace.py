"""The task that advances the engine with a clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tenuto.sim.server.clock import Clock
from tenuto.sim.server.engine import Engine, ServedRequest, ServedTurn

WARN_LAG_S = 1.0
"""The log warns at this lag in real seconds, and again each time the lag has doubled."""
MAX_BUSY_S = 0.05
"""Real seconds for which the engine may block the event loop at a time."""

logger = logging.getLogger("tenuto.sim")


class Pacer:
    """Advances an engine to the clock's time repeatedly. Everything runs in one event loop."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.error: Exception | None = None
        """The error that ended the engine, or None."""
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

    def wake(self) -> None:
        """Something changed from outside: look at once what is due."""
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled, or until the engine fails; then every waiting turn gets the error."""
        try:
            while True:
                await self._advance()
        except Exception as error:
            logger.exception("the simulated engine has ended")
            self.error = error
            self.engine.fail(error)

    async def _advance(self) -> None:
        next_s = self._catch_up()
        timer = None
        if next_s is not None:
            delay_s = self.clock.get_real_duration_s(next_s - self.clock.get_now_s())
            if delay_s <= 0:
                # More events are due, but first the handlers send the tokens that are ready.
                await asyncio.sleep(0)
                return
            timer = asyncio.get_running_loop().call_later(delay_s, self._news.set)
        await self._news.wait()
        self._news.clear()
        if timer is not None:
            timer.cancel()

    def _catch_up(self) -> float | None:
        """Handle due events for `MAX_BUSY_S` at most. Returns the time of the next event, or None.

        Handlers cannot send meanwhile. So if sending is slow, several tokens are sent at a time, and the
        engine does not lag.
        """
        now_s = self.clock.get_now_s()
        limit_s = now_s + self.clock.speed * MAX_BUSY_S
        while True:
            num_steps = self.engine.num_finished_steps
            next_s = self.engine.advance(now_s)
            if self.engine.num_finished_steps > num_steps:
                self._count_lag(self.clock.get_real_duration_s(self.clock.get_now_s() - self.engine.now_s))
            if next_s is None or next_s > now_s or self.clock.get_now_s() > limit_s:
                return next_s

    def _count_lag(self, lag_s: float) -> None:
        self.engine.stats.lag_s.observe(lag_s)
        if lag_s > self._warn_lag_s:
            self._warn_lag_s = 2 * lag_s
            logger.warning(
                "%.1f s late: this machine is busy, or too slow for speed %g", lag_s, self.clock.speed
            )
