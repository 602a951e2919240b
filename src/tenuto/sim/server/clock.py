"""Simulated time at any speed."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Runs `speed` times as fast as the machine's monotonic clock, from the moment it is made."""

    def __init__(self, speed: float, get_real_s: Callable[[], float] = time.monotonic) -> None:
        self.speed = speed
        self._get_real_s = get_real_s
        self._start_s = get_real_s()

    def get_now_s(self) -> float:
        """Simulated seconds; at speed 1 they are the machine's."""
        return self._start_s + (self._get_real_s() - self._start_s) * self.speed

    def get_real_duration_s(self, duration_s: float) -> float:
        """Real seconds in which so many simulated seconds pass."""
        return duration_s / self.speed
