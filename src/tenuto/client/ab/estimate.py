"""Estimates the ratio between two arms from one ratio per pair, with an interval and its reliability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy import stats

from tenuto.records.metrics import get_geometric_mean

CONFIDENCE = 0.95
MIN_PAIRS = 6
"""With fewer pairs, all pairs agree on the better arm by chance in more than 1 of 20 cases (2/2⁵)."""
POWER = 0.8
PLANNED_CHANGE = 0.05
"""The relative difference for which `num_pairs_needed` is computed."""
NUM_RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio between two arms."""

    ratio: float
    """Geometric mean over the pairs."""
    low: float | None
    """Lower end of the 95 % interval. None with fewer than two pairs."""
    high: float | None
    num_pairs: int
    num_pairs_needed: int | None
    """About how many pairs are needed to detect a difference of 5 % with a probability of 80 %, if the ratios
    scatter as these do. None with fewer than two pairs."""

    @property
    def is_trusted(self) -> bool:
        """Whether there are enough pairs for a reliable interval."""
        return self.num_pairs >= MIN_PAIRS

    def differs(self, threshold: float) -> bool:
        """Whether the data show that the arms differ by more than the threshold (0.01 is 1 %)."""
        if not self.is_trusted or self.low is None or self.high is None:
            return False
        return not self.low <= 1 <= self.high and abs(self.ratio - 1) >= threshold


def estimate_ratio(ratios: Sequence[float]) -> Estimate:
    """Estimate from the pairs' ratios, each above 0. The same ratios always give the same estimate.

    The interval is the bootstrap's percentile interval of the mean logarithm. It is widened by the factor
    between Student's interval and the normal interval, because it would be too narrow for few pairs. Source:
    T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 5 ("expanded percentile
    interval"). Fewer pairs than `MIN_PAIRS` have Student's interval, as a bootstrap stays within the range of
    its values. Raises ValueError if there are no ratios.
    """
    logs = [math.log(ratio) for ratio in ratios]
    ratio = get_geometric_mean(ratios)
    if len(logs) < 2:
        return Estimate(ratio, None, None, len(logs), None)
    low, high = _bootstrap(logs) if len(logs) >= MIN_PAIRS else _get_students_interval(logs)
    return Estimate(ratio, math.exp(low), math.exp(high), len(logs), _plan(stdev(logs)))


def _bootstrap(logs: Sequence[float]) -> tuple[float, float]:
    num = len(logs)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, num - 1)) * math.sqrt(num / (num - 1))
    found = stats.bootstrap(
        (np.asarray(logs),),
        np.mean,
        n_resamples=NUM_RESAMPLES,
        confidence_level=1 - 2 * float(stats.norm.sf(quantile)),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def _get_students_interval(logs: Sequence[float]) -> tuple[float, float]:
    num = len(logs)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, num - 1)) * stdev(logs) / math.sqrt(num)
    return fmean(logs) - reach, fmean(logs) + reach


def _plan(deviation: float) -> int:
    wanted = float(stats.norm.ppf((1 + CONFIDENCE) / 2) + stats.norm.ppf(POWER))
    return max(MIN_PAIRS, math.ceil((wanted * deviation / math.log1p(PLANNED_CHANGE)) ** 2))
