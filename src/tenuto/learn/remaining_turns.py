"""How many turns a job still has, given how many it had: the mean residual life of finished jobs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

MAX_JOBS = 1000
"""Finished jobs remembered."""


class RemainingTurns:
    """The empirical distribution of turns per job, with the survivors' mean at every age."""

    def __init__(self, num_turns: Iterable[int] = ()) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._suffix_sums: list[int] | None = None
        for each in num_turns:
            self.observe(each)

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, num_turns: int) -> None:
        """Count a finished job; raises ValueError if it had no turn."""
        if not isinstance(num_turns, int) or num_turns < 1:
            raise ValueError(f"a finished job has a turn at least, got {num_turns!r}")
        if len(self._recent) == MAX_JOBS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(num_turns)
        insort(self._sorted, num_turns)
        self._suffix_sums = None

    def get_mean_left(self, num_turns: int) -> float:
        """Mean turns that jobs had beyond `num_turns`, of those that had more; at least 1.

        One that outlived all others is expected to have one more; without any finished job, every job is.
        """
        first = bisect_right(self._sorted, num_turns)
        num_longer = len(self._sorted) - first
        if num_longer == 0:
            return 1.0
        return self._sum_from(first) / num_longer - num_turns

    def get_state(self) -> list[int]:
        """The jobs' numbers of turns, oldest first; the constructor takes them back."""
        return list(self._recent)

    def _sum_from(self, first: int) -> int:
        if self._suffix_sums is None:
            total, sums = 0, []
            for value in reversed(self._sorted):
                total += value
                sums.append(total)
            self._suffix_sums = sums[::-1]
        return self._suffix_sums[first]

    def __repr__(self) -> str:
        return f"RemainingTurns({list(self._recent)})"
