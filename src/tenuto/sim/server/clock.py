"""Simulated time at any speed."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """A clock that runs `speed` times as fast as the machine's monotonic clock.

    It starts when it is created.
    """

    def __init__(self, speed: float, get_real_s: Callable[[], float] = time.monotonic) -> None:
        self.speed = speed
        self._get_real_s = get_real_s
        self._start_s = get_real_s()

    def get_now_s(self) -> float:
        """Return the simulated time in seconds. At speed 1 it equals the machine's clock."""
        return self._start_s + (self._get_real_s() - self._start_s) * self.speed

    def get_real_duration_s(self, duration_s: float) -> float:
        """Return how many real seconds the given simulated seconds take."""
        return duration_s / self.speed
