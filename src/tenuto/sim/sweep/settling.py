"""Is a queueing system in a steady state, and when to stop watching it?

    jobs in the system │            growing                 │   steady
                       │         ⟋                          │   ╭∿∿∿∿∿∿∿
                       │     ⟋                              │  ╱
                       │ ⟋                                  │ ╱ warm-up
                       └───────────────── time              └────────── time

Judged from when jobs arrived and when they left, by nothing else. The backlog is the number of jobs in the
system. Its warm-up is cut by MSER (White 1997: cut where the standard error of the mean of the rest is
smallest). The rest must have no trend.

A system is watched until the second look in a row that finds it steady, or until it surely grows. The looks
are at moments that do not depend on how long the user asked to watch. So neither does the answer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Literal, get_args

from tenuto.records.metrics import get_percentile

State = Literal["steady", "growing", "unclear"]

NUM_POINTS = 200
"""Points in time at which the backlog is looked at."""
NUM_BATCHES = 20
"""Means of neighbouring points, for the trend."""
MAX_LIKENESS = 0.8
"""Bound of the correlation of neighbouring batches."""
MAX_DRIFT = 0.25
"""A steady backlog grows or shrinks by this share of its mean at most, from the warm-up to the end."""
MIN_GROWTH = 0.6
"""A growing backlog grows by this share of its mean at least, over the last three quarters of the time. It
would be 1.2 for a backlog that grows evenly from nothing."""
MIN_ENDS = 40
"""Jobs that must have left in a quarter of the time, for the rate at which they leave."""


@dataclass(frozen=True)
class Look:
    """What a look at a system showed. Rates are jobs per second after the warm-up."""

    state: State
    warm_up_s: float
    offered_jps: float
    finished_jps: float
    backlog: float
    """Mean jobs in the system after the warm-up."""


@dataclass(frozen=True)
class Trend:
    """The line through equally spaced values. Both figures are over the whole length of the values."""

    growth: float
    error: float
    """Standard error of `growth`."""


def look(arrivals_s: Sequence[float], ends_s: Sequence[float], now_s: float) -> Look:
    """Look at a system at a moment. Both lists are sorted; what comes later is not looked at."""
    points_s = [now_s * (number + 1) / NUM_POINTS for number in range(NUM_POINTS)]
    backlog = [float(bisect_right(arrivals_s, at_s) - bisect_right(ends_s, at_s)) for at_s in points_s]
    cut = find_warm_up(backlog)
    warm_up_s = now_s * cut / NUM_POINTS
    rest = backlog[cut:]
    trend, mean = fit_trend(rest), fmean(rest)
    if _is_growing(arrivals_s, ends_s, now_s, backlog):
        state: State = "growing"
    elif abs(trend.growth) <= max(MAX_DRIFT * mean, 2 * trend.error):
        state = "steady"
    else:
        state = "unclear"
    return Look(
        state,
        warm_up_s,
        _get_rate(arrivals_s, warm_up_s, now_s),
        _get_rate(ends_s, warm_up_s, now_s),
        mean,
    )


def find_warm_up(values: Sequence[float]) -> int:
    """How many values to cut at the beginning, by MSER: half of them at most."""
    best, cut = math.inf, 0
    total = sum(values)
    squares = sum(value * value for value in values)
    num = len(values)
    for start in range(len(values) // 2 + 1):
        variance = max(0.0, squares / num - (total / num) ** 2)
        if variance / num < best:
            best, cut = variance / num, start
        total -= values[start]
        squares -= values[start] ** 2
        num -= 1
    return cut


def fit_trend(values: Sequence[float]) -> Trend:
    """The line through the means of `NUM_BATCHES` batches of the values."""
    size = len(values) / NUM_BATCHES
    means = [fmean(values[int(n * size) : int((n + 1) * size)]) for n in range(NUM_BATCHES)]
    middle, mean = (NUM_BATCHES - 1) / 2, fmean(means)
    spread = sum((n - middle) ** 2 for n in range(NUM_BATCHES))
    slope = sum((n - middle) * (value - mean) for n, value in enumerate(means)) / spread
    residuals = [value - mean - slope * (n - middle) for n, value in enumerate(means)]
    squares = sum(each * each for each in residuals)
    error = math.sqrt(squares / (NUM_BATCHES - 2) / spread)
    # A busy queue changes slowly: batches beside each other are alike, so there are fewer than it seems.
    likeness = sum(a * b for a, b in pairwise(residuals)) / squares if squares else 0.0
    likeness = min(max(likeness, 0.0), MAX_LIKENESS)
    error *= math.sqrt((1 + likeness) / (1 - likeness))
    return Trend(slope * NUM_BATCHES, error * NUM_BATCHES)


def _is_growing(
    arrivals_s: Sequence[float], ends_s: Sequence[float], now_s: float, backlog: Sequence[float]
) -> bool:
    """Whether the backlog surely grows, and not because the system still fills.

    While it fills, jobs leave faster and faster. When it is overloaded, they leave at one rate, which is less
    than that of the arrivals by more than chance.
    """
    late = backlog[len(backlog) // 4 :]
    trend = fit_trend(late)
    if trend.growth < MIN_GROWTH * fmean(late) or trend.growth < 3 * trend.error:
        return False
    num_arrivals = _count(arrivals_s, now_s / 2, now_s)
    third, fourth = _count(ends_s, now_s / 2, 0.75 * now_s), _count(ends_s, 0.75 * now_s, now_s)
    if third < MIN_ENDS or fourth > third + 3 * math.sqrt(2 * third):
        return False
    return num_arrivals - (third + fourth) > max(0.05 * num_arrivals, 3 * math.sqrt(num_arrivals))


def _count(times_s: Sequence[float], start_s: float, end_s: float) -> int:
    return bisect_right(times_s, end_s) - bisect_right(times_s, start_s)


def _get_rate(times_s: Sequence[float], start_s: float, end_s: float) -> float:
    return _count(times_s, start_s, end_s) / (end_s - start_s)


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
