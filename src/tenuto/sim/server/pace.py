"""The task that lets the engine do, at each moment, what has happened by then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tenuto.sim.server.clock import Clock
from tenuto.sim.server.engine import Engine, ServedRequest, Turn

WARN_LAG_S = 1.0
"""Real seconds behind at which the log says so, and again at every doubling."""
MAX_BUSY_S = 0.05
"""Real seconds that the engine may keep the event loop for itself."""

logger = logging.getLogger("tenuto.sim")


class Pacer:
    """Drives an engine by a clock. Everything happens in one event loop."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.error: Exception | None = None
        """Why the engine has ended, if it has."""
        self._news = asyncio.Event()
        self._warn_lag_s = WARN_LAG_S

    def submit(self, request: ServedRequest, on_news: Callable[[], None]) -> Turn:
        """Hand a request in that arrives now. Raises what the engine has ended with, if it has."""
        if self.error is not None:
            raise self.error
        request.arrival_s = self.clock.get_now_s()
        turn = self.engine.submit(request, on_news)
        self._news.set()
        return turn

    def abort(self, turn: Turn) -> None:
        """Nobody wants the rest of a turn; nothing happens if it is done."""
        self.engine.abort(turn, self.clock.get_now_s())
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled, or until the engine fails: then all who wait are told."""
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
                # More is due, but first whoever got tokens may send them.
                await asyncio.sleep(0)
                return
            timer = asyncio.get_running_loop().call_later(delay_s, self._news.set)
        await self._news.wait()
        self._news.clear()
        if timer is not None:
            timer.cancel()

    def _catch_up(self) -> float | None:
        """Do what is due, for a while at most; returns when the next thing happens, if one does.

        All of it, before anyone sends anything: where sending is what takes long, tokens then go out
        several at a time, and the engine keeps its time.
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
