"""How long turns run, from their start to their end."""

from __future__ import annotations

import math

WEIGHT = 0.05
"""Smallest weight of the latest turn in the mean; the first turns weigh more."""


class TurnTimes:
    """The turns that run, and the mean time that the latest twenty or so took."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._mean_s = 0.0
        self._num_ended = 0

    @property
    def mean_s(self) -> float:
        """Mean seconds of a turn; infinity before one has ended."""
        return self._mean_s if self._num_ended else math.inf

    def start(self, turn_id: str, now_s: float) -> None:
        """A turn started. If it was preempted and starts again, the first start counts."""
        self._started.setdefault(turn_id, now_s)

    def end(self, turn_id: str, now_s: float) -> None:
        """A turn ended, or left before it started."""
        start_s = self._started.pop(turn_id, None)
        if start_s is not None:
            self._num_ended += 1
            weight = max(WEIGHT, 1 / self._num_ended)
            self._mean_s += weight * (now_s - start_s - self._mean_s)

    def __repr__(self) -> str:
        return f"TurnTimes({len(self._started)} running, {self._num_ended} ended, mean {self._mean_s} s)"
