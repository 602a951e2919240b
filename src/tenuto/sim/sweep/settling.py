"""When to stop watching a system: at the second look in a row that finds it steady, or once it surely grows.

The looks are at moments that do not depend on how long the user asked to watch. So neither does the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tenuto.records.metrics import get_percentile
from tenuto.sim.sweep.trend import Look, look

Verdict = Literal["overloaded", "late", "unsettled", "steady"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the worst to the best. Late: stopped because a target is surely missed."""

STRETCH = 1.3
"""Each look is this much later than the one before."""
COHORT = 0.8
"""Jobs that arrived until this share of the time count. Most of the later ones are not done yet."""


@dataclass(kw_only=True)
class Settling:
    """Decides after each look whether to go on."""

    first_look_s: float
    """Several times as long as a job takes alone, so that the system has had time to fill."""
    min_jobs: int
    max_jobs: int
    shortest_s: float = 0.0
    """A steady system is watched for so long at least."""
    longest_s: float = 0.0
    """The limit in jobs does not end the watch before this time."""
    next_look_s: float = field(init=False)
    last: Look | None = field(init=False, default=None)
    _num_steady: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Plan the first look."""
        self.next_look_s = self.first_look_s

    def decide(self, arrivals_s: Sequence[float], ends_s: Sequence[float], now_s: float) -> Verdict | None:
        """Look at the system. Both lists are sorted and may reach beyond now. None: look again later."""
        self.last = seen = look(arrivals_s, ends_s, now_s)
        num_jobs = bisect_right(arrivals_s, now_s)
        self.next_look_s = now_s * STRETCH
        if seen.state == "growing":
            return "overloaded"
        has_seen_enough = num_jobs >= self.min_jobs and now_s >= self.shortest_s
        self._num_steady = self._num_steady + 1 if seen.state == "steady" else 0
        if has_seen_enough and self._num_steady > 1:
            return "steady"
        if num_jobs >= self.max_jobs and now_s >= self.longest_s:
            return "unsettled"
        return None


def are_done(arrivals_s: Sequence[float], times_s: Sequence[float], now_s: float) -> bool:
    """Whether the times of the cohort's jobs are known well enough: its P95 is shorter than it was watched.

    `times_s` has for each arrival the job's time, or its age if it is not done.
    """
    cohort = times_s[: bisect_right(arrivals_s, COHORT * now_s)]
    return bool(cohort) and get_percentile(cohort, 95) <= (1 - COHORT) * now_s
