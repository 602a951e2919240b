"""How likely a starting job's next turn is to meet today's queue, and how long turns run.

If the queue is empty before it comes back, its later turns compete with nobody who waits now. Then turns
compete, not jobs, and the shortest turn should go first. If the queue lasts longer than tools do, whole jobs
compete.
"""

from __future__ import annotations

import math

from tenuto.core.turn_work import MovingMean

MIN_AWAY_S = 0.01
"""Shorter tool calls count as this long."""
WEIGHT = 0.02
"""Weight of the latest tool call in the mean."""


class Backlog:
    """The turns that wait, how long there have been some without a break, and how long tools take."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._since_s = 0.0
        """Since when turns have been waiting, if any are."""
        self._log_away_s = 0.0
        """Mean logarithm of tool times: a few people who think for minutes must not hide many fast tools."""

    def wait(self, turn_id: str, now_s: float) -> None:
        """A turn waits from now on."""
        if not self._waiting:
            self._since_s = now_s
        self._waiting.add(turn_id)

    def leave(self, turn_id: str) -> None:
        """A turn started, or ended."""
        self._waiting.discard(turn_id)

    def come_back(self, away_s: float) -> None:
        """A job sent its next turn, after so many seconds."""
        self._log_away_s += WEIGHT * (math.log(max(away_s, MIN_AWAY_S)) - self._log_away_s)

    def get_share_back(self, now_s: float) -> float:
        """The share of jobs that come back before the queue is empty, from 0 (no queue) towards 1.

        A queue that has lasted so long is expected to last as long again.
        """
        lasted_s = max(0.0, now_s - self._since_s) if self._waiting else 0.0
        return lasted_s / (lasted_s + math.exp(self._log_away_s))

    def __repr__(self) -> str:
        return f"Backlog({len(self._waiting)} since {self._since_s}, {self._log_away_s})"


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
