"""The latest samples of a server's metrics: rates, percentiles and trends."""

from __future__ import annotations

import math
from collections import deque

from tenuto.client.metrics import Buckets, Page

_RESET_SIGNS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "tenuto:leases_granted_total")


class Window:
    """Looks of the last `span_s` seconds, the newest last; forgets what was before a server's restart."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._pages: deque[Page] = deque()

    def add(self, page: Page) -> None:
        """One more look."""
        if self._pages and _has_restarted(self._pages[-1], page):
            self._pages.clear()
        self._pages.append(page)
        # Keep one look that is older than the window, so that the looks span the whole window.
        while len(self._pages) > 2 and self._pages[1].at_s <= page.at_s - self._span_s:
            self._pages.popleft()

    @property
    def newest(self) -> Page:
        """The last look. Raises IndexError before the first."""
        return self._pages[-1]

    @property
    def length_s(self) -> float:
        """From the oldest to the newest look."""
        return self._pages[-1].at_s - self._pages[0].at_s

    def growth(self, name: str, **labels: str) -> float | None:
        """How much a counter grew; one that the first look does not have grew from 0."""
        new = self.newest.total(name, **labels)
        if new is None or len(self._pages) < 2:
            return None
        return max(0.0, new - (self._pages[0].total(name, **labels) or 0.0))

    def rate(self, name: str, **labels: str) -> float | None:
        """Growth per second."""
        growth = self.growth(name, **labels)
        return None if growth is None or self.length_s <= 0 else growth / self.length_s

    def ratio(self, part: str, whole: str) -> float | None:
        """How much one counter grew for each one of another."""
        numerator, denominator = self.growth(part), self.growth(whole)
        return numerator / denominator if numerator is not None and denominator else None

    def buckets(self, name: str) -> Buckets:
        """What a histogram counted since the window's first look."""
        new, old = self.newest.buckets(name), self._pages[0].buckets(name)
        return {bound: max(0.0, count - old.get(bound, 0.0)) for bound, count in sorted(new.items())}

    def percentile(self, name: str, percent: float) -> float | None:
        """A histogram's percentile since the window's first look."""
        return get_percentile(self.buckets(name), percent)


def get_percentile(buckets: Buckets, percent: float) -> float | None:
    """Linear within the bucket it falls in, as Prometheus' histogram_quantile; None without values."""
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    rank, low, below = percent / 100 * total, 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            if math.isinf(bound):
                break
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


def _has_restarted(before: Page, after: Page) -> bool:
    pairs = [(before.total(name), after.total(name)) for name in _RESET_SIGNS]
    return any(old is not None and new is not None and new < old for old, new in pairs)
