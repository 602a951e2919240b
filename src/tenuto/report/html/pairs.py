"""Two policies at one load, pair by pair. The estimate is that of `tenuto ab`, so the two never disagree.

A pair is what both policies ran with one seed. It gives one ratio, over the jobs that all policies finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from tenuto.client.ab_verdict import Estimate, estimate_ratio
from tenuto.client.options import THRESHOLD_PERCENT
from tenuto.records.metrics import get_percentile
from tenuto.report.html.records import Run

MIN_TIME_S = 1e-9
"""Shorter times are none: no job takes them, and their ratios have no meaning."""


class JobTimes(NamedTuple):
    """What one policy's jobs took with one seed."""

    mean_s: float
    p95_s: float | None


Pair = Mapping[str, JobTimes]
"""By policy, for one seed."""


@dataclass(frozen=True)
class Contrast:
    """One policy's JCT over another's. Ratios below 1 mean that the first one is faster."""

    policy: str
    other: str
    ratios: tuple[float, ...]
    """Of the means, one for each pair."""
    mean: Estimate
    p95: Estimate | None
    values: JobTimes
    """Means over the pairs, of `policy`."""
    other_values: JobTimes
    threshold: float
    """Differences below it do not matter."""
    is_simulated: bool
    """The simulator's own runs: a seed has one result, so two pairs are enough for an interval."""
    is_paired: bool
    """Both ran with one seed at least. Without, the ratio is of other jobs, and shows nothing."""
    is_valid: bool
    """No run says that its figures are INVALID."""

    @property
    def is_open(self) -> bool:
        """Whether these runs cannot show anything, whatever their ratio is."""
        is_enough = self.mean.num_pairs > 1 if self.is_simulated else self.mean.is_trusted
        return not (self.is_valid and self.is_paired and is_enough)

    @property
    def differs(self) -> bool:
        """Whether the runs show that one of the two is faster."""
        ratio, low, high = self.mean.ratio, self.mean.low, self.mean.high
        if self.is_open or low is None or high is None:
            return False
        return not low <= 1 <= high and abs(ratio - 1) >= self.threshold

    @property
    def is_ahead(self) -> bool:
        """Whether the runs show that `policy` is faster."""
        return self.differs and self.mean.ratio < 1


def make_pairs(runs: Mapping[str, Sequence[Run]]) -> dict[int | None, Pair]:
    """By seed, the job times of the policies that ran with it and took any time.

    `runs`: by policy, at one load of one setting.

    A job that failed with one policy is left out with all, as in `tenuto ab`, because failed jobs are mostly
    long. Runs of one policy with the same seed count as one.
    """
    seeds = dict.fromkeys(run.seed for each in runs.values() for run in each)
    pairs: dict[int | None, Pair] = {}
    for seed in seeds:
        same = {policy: [run for run in each if run.seed == seed] for policy, each in runs.items()}
        known = [frozenset(run.job_times_s) for each in same.values() for run in each if run.job_times_s]
        jobs = frozenset.intersection(*known) if known else frozenset()
        found = {policy: _get_times(each, jobs) for policy, each in same.items()}
        pairs[seed] = {policy: times for policy, times in found.items() if times is not None}
    return pairs


def _get_times(runs: Sequence[Run], jobs: frozenset[str]) -> JobTimes | None:
    times = [each for run in runs if (each := _get_run_times(run, jobs)) is not None]
    times = [each for each in times if each.mean_s >= MIN_TIME_S]
    return _average(times)


def _get_run_times(run: Run, jobs: frozenset[str]) -> JobTimes | None:
    # A record may know its mean only.
    if not run.job_times_s or len(run.job_times_s) == len(jobs):
        return None if run.mean_s is None else JobTimes(run.mean_s, run.p95_s)
    times_s = [time_s for job, time_s in run.job_times_s.items() if job in jobs]
    return JobTimes(fmean(times_s), get_percentile(times_s, 95)) if times_s else None


def contrast(
    runs: Mapping[str, Sequence[Run]], pairs: Mapping[int | None, Pair], policy: str, other: str
) -> Contrast | None:
    """Compare two policies; None if one has no job times. `pairs`: of `make_pairs`."""
    known = [pair for pair in pairs.values() if policy in pair and other in pair]
    both = [*runs[policy], *runs[other]]
    if any(run.ab is not None for run in both):
        # `tenuto ab` counts the repeats that all its arms have run.
        known = [pair for pair in known if runs.keys() <= pair.keys()]
    is_paired = bool(known)
    values, other_values = (
        _average([pair[each] for pair in known or pairs.values() if each in pair]) for each in (policy, other)
    )
    if not (values and other_values):
        return None
    means = [(pair[policy].mean_s, pair[other].mean_s) for pair in known]
    ratios = tuple(one / two for one, two in means or [(values.mean_s, other_values.mean_s)])
    p95s = [
        (one, two)
        for pair in known
        if (one := pair[policy].p95_s or 0) >= MIN_TIME_S and (two := pair[other].p95_s or 0) >= MIN_TIME_S
    ]
    return Contrast(
        policy,
        other,
        ratios=ratios,
        mean=_estimate(ratios),
        p95=_estimate(tuple(one / two for one, two in p95s)) if len(p95s) == len(means) and p95s else None,
        values=values,
        other_values=other_values,
        threshold=next((run.ab.threshold for run in both if run.ab), THRESHOLD_PERCENT / 100),
        is_simulated=all(run.setting.is_simulated for run in both),
        is_paired=is_paired,
        is_valid=not any(run.invalid for run in both),
    )


def _average(times: Sequence[JobTimes]) -> JobTimes | None:
    if not times:
        return None
    p95s = [each.p95_s for each in times if each.p95_s is not None]
    return JobTimes(fmean(each.mean_s for each in times), fmean(p95s) if p95s else None)


@lru_cache(4096)
def _estimate(ratios: tuple[float, ...]) -> Estimate:
    return estimate_ratio(ratios)
