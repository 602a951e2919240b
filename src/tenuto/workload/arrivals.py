"""Arrival times of jobs: Poisson, gamma or fixed gaps. A seed gives the same times in every process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, takewhile

from tenuto.core.errors import ConfigError
from tenuto.workload.schema import Job, Workload, find_roots


def arrival_times(process: str, jps: float, seed: int) -> Iterator[float]:
    """Generate rising arrival times in seconds without end. The first arrival comes one gap after 0.

    `process` is "poisson", "gamma:CV" or "fixed". CV is the gaps' coefficient of variation: 1 is Poisson, and
    higher values mean more bursts. `jps` is the mean rate in jobs per second. Raises ConfigError.
    """
    if not 0 < jps < math.inf:
        raise ConfigError(f"jps must be a finite number above 0, got {jps!r}")
    kind, _, cv_text = process.partition(":")
    if process == "fixed":
        return (number / jps for number in count(1))
    rng = random.Random(seed)
    if process == "poisson":
        return _add_up(lambda: rng.expovariate(jps))
    if kind == "gamma":
        cv = _parse_cv(cv_text)
        return _add_up(lambda: rng.gammavariate(1 / cv**2, cv**2 / jps))
    raise ConfigError(f"arrival must be poisson, gamma:CV or fixed, got {process!r}")


def within(times: Iterator[float], window_s: float) -> Iterator[float]:
    """The times up to `window_s` seconds. Raises ConfigError if `window_s` is not positive and finite."""
    if not 0 < window_s < math.inf:
        raise ConfigError(f"window_s must be a finite number of seconds above 0, got {window_s!r}")
    return takewhile(lambda time_s: time_s <= window_s, times)


def reassign_arrivals(workload: Workload, times: Iterator[float]) -> Workload:
    """Assign the given arrival times to the jobs, in order. Stops when the jobs or the times run out.

    Jobs that another job started, and recorded send times, shift together with the job they belong to.
    """
    roots = find_roots(workload.name, workload.jobs)
    shifts: dict[str, float] = {}
    # List the jobs first: otherwise zip would draw a time that no job uses.
    for job, time_s in zip((job for job in workload.jobs if job.parent is None), times, strict=False):
        shifts[job.job_id] = time_s - job.arrival_s
    moved = (_shift(job, shifts[roots[job.job_id]]) for job in workload.jobs if roots[job.job_id] in shifts)
    return replace(workload, jobs=tuple(moved))


def _shift(job: Job, shift_s: float) -> Job:
    # Rounding may make a time slightly negative.
    turns = tuple(
        turn if turn.at_s is None else replace(turn, at_s=max(0.0, turn.at_s + shift_s)) for turn in job.turns
    )
    return replace(job, arrival_s=max(0.0, job.arrival_s + shift_s), turns=turns)


def _add_up(draw_gap_s: Callable[[], float]) -> Iterator[float]:
    time_s = 0.0
    while True:
        time_s += draw_gap_s()
        yield time_s


def _parse_cv(text: str) -> float:
    try:
        cv = float(text)
    except ValueError:
        cv = math.nan
    if not 0.01 <= cv <= 100:
        raise ConfigError(f"gamma arrivals need a coefficient of variation from 0.01 to 100, got {text!r}")
    return cv
