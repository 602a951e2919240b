"""The times of one tool's last calls, in the order of their length."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

MAX_TIMES = 500
"""Calls remembered of one tool: the share within a time is then known to 2.2 % (one standard error)."""


class RecentTimes:
    """The last `max_times` samples in seconds, oldest forgotten first, also kept sorted."""

    def __init__(self, times_s: Iterable[float] = (), max_times: int = MAX_TIMES) -> None:
        self._max_times = max_times
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        for time_s in times_s:
            self.observe(time_s)

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, time_s: float) -> None:
        """Add one sample; raises ValueError if it is no time. A memmove of at most `max_times` pointers."""
        if not (math.isfinite(time_s) and time_s >= 0):
            raise ValueError(f"a time must be finite and not negative, got {time_s!r}")
        if len(self._recent) == self._max_times:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(time_s)
        insort(self._sorted, time_s)

    def get_sorted(self) -> Sequence[float]:
        """The samples in ascending order; not to be changed."""
        return self._sorted

    def get_state(self) -> list[float]:
        """The samples, oldest first, as JSON can hold them; the constructor takes them back."""
        return list(self._recent)

    def __repr__(self) -> str:
        return f"RecentTimes({list(self._recent)})"
