"""Times to the first token in the engine, for the two parts of a canary."""

from __future__ import annotations

from typing import Any

from tenuto.core.driver import Driver


class FirstTokens:
    """Watches turns from their start to their first token; a step looks at those turns only."""

    def __init__(self, scheduler: Any, driver: Driver) -> None:
        self._scheduler = scheduler
        self._driver = driver
        self._pending: dict[str, float] = {}
        """Arrival times of turns that have started and have no token yet."""

    def start(self, request_id: str) -> None:
        """A turn got a step; call before the driver is told."""
        arrival_s = self._driver.get_arrival_s(request_id)
        if arrival_s is not None and not self._driver.has_started(request_id):
            self._pending[request_id] = arrival_s

    def look(self, now_s: float) -> None:
        """A step's results have been processed."""
        requests = self._scheduler.requests
        for request_id in [each for each in self._pending if requests[each].num_output_tokens]:
            self._observe(request_id, now_s)

    def finish(self, request: Any, now_s: float) -> None:
        """A turn ends; the driver still knows it."""
        if request.request_id in self._pending:
            if request.num_output_tokens:
                self._observe(request.request_id, now_s)
            else:
                del self._pending[request.request_id]

    def _observe(self, request_id: str, now_s: float) -> None:
        group = "stock" if self._driver.runs_as_stock(request_id) else "policy"
        self._driver.stats.groups[group].first_token_s.observe(now_s - self._pending.pop(request_id))
