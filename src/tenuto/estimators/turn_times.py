"""How long turns run, from their start to their end."""

from __future__ import annotations

import math

from tenuto.core.turn_work import MovingMean


class TurnTimes:
    """The turns that run, and the mean time that the latest ones took."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._mean = MovingMean()

    @property
    def mean_s(self) -> float:
        """Mean seconds of a turn; infinity before one has ended."""
        return self._mean.value if self._mean.num_values else math.inf

    def start(self, turn_id: str, now_s: float) -> None:
        """A turn started. If it was preempted and starts again, the first start counts."""
        self._started.setdefault(turn_id, now_s)

    def end(self, turn_id: str, now_s: float) -> None:
        """A turn ended, or left before it started."""
        start_s = self._started.pop(turn_id, None)
        if start_s is not None:
            self._mean.observe(now_s - start_s)

    def __repr__(self) -> str:
        return f"TurnTimes({len(self._started)} running, mean {self.mean_s} s)"
