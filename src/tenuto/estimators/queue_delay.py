"""How long a turn waits in the queue if its job's cache is lost: Continuum's T (arXiv 2511.02230)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

MAX_DELAYS = 100
"""Number of turns in the mean; small, because the queue changes within minutes."""


class QueueDelay:
    """Sliding mean of the queueing delays of turns that came back and found nothing pinned.

    Pinned jobs go first, so all of such a turn's wait counts as extra.
    """

    def __init__(self, delays_s: Iterable[float] = (), max_delays: int = MAX_DELAYS) -> None:
        self._delays: deque[float] = deque(maxlen=max_delays)
        for delay_s in delays_s:
            self.observe(delay_s)

    def observe(self, delay_s: float) -> None:
        """Count one turn's wait from its arrival to its first step."""
        if not (math.isfinite(delay_s) and delay_s >= 0):
            raise ValueError(f"a delay must be finite and not negative, got {delay_s!r}")
        self._delays.append(delay_s)

    def get_mean_s(self) -> float:
        """T in seconds; 0 while no such turn was seen."""
        return math.fsum(self._delays) / len(self._delays) if self._delays else 0.0

    def get_state(self) -> list[float]:
        """The delays, oldest first, as JSON can hold them; the constructor takes them back."""
        return list(self._delays)

    def __repr__(self) -> str:
        return f"QueueDelay({list(self._delays)})"
