"""Inter-token latencies: the gaps between one answer's output tokens, counted over all answers of a run.

A run has millions of gaps, and the decodes of one step all have the same one. So equal gaps that come after
each other are kept as one value with a count.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate

from tenuto.records.schema import Stats


class Gaps:
    """Gaps in seconds, each with the number of tokens that came after it."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._counts = array("q")

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` gaps of the same length."""
        if count == 0:
            return
        if self._seconds and self._seconds[-1] == seconds:
            self._counts[-1] += count
        else:
            self._seconds.append(seconds)
            self._counts.append(count)

    def merge(self, other: Gaps) -> None:
        """Add all gaps of another count."""
        self._seconds += other._seconds
        self._counts += other._counts

    def summarise(self) -> Stats | None:
        """Mean, percentiles and extremes of all gaps, as `metrics.summarise`; None if there is no gap."""
        if not self._seconds:
            return None
        pairs = sorted(zip(self._seconds, self._counts, strict=True))
        values = [seconds for seconds, _ in pairs]
        ends = list(accumulate(count for _, count in pairs))
        mean = sum(seconds * count for seconds, count in pairs) / ends[-1]
        p50, p90, p95, p99 = (_find_percentile(values, ends, percent) for percent in (50, 90, 95, 99))
        return Stats(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=values[-1], min=values[0])


def _find_percentile(values: list[float], ends: list[int], percent: float) -> float:
    """The percentile of sorted values; `ends` says up to which position each of them reaches."""
    position = (ends[-1] - 1) * percent / 100
    low = int(position)
    first, second = (values[bisect_right(ends, min(at, ends[-1] - 1))] for at in (low, low + 1))
    return first + (second - first) * (position - low)
