"""How long a job's cache is worth keeping: Continuum's rule (arXiv 2511.02230).

A cache that is still there when the tool returns saves `benefit_s` = T·η + PR: the queueing delay that an
evicted turn sees (T, weighted by how far jobs are from memoryless, η) and the time to reload or recompute
(PR). Keeping it for τ costs τ, whenever the tool returns:

    τ* = argmax over τ in {0} ∪ samples of  P(tool time ≤ τ) · benefit_s − τ
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from tenuto.estimators.samples import MIN_SAMPLES, ToolSamples

_CHUNK = 32


def get_ttl_s(
    samples: ToolSamples,
    tool: str,
    *,
    queue_delay_s: float,
    eta: float,
    reload_s: float,
    min_samples: int = MIN_SAMPLES,
) -> float:
    """τ* for a tool, by its own times, by those of all tools, or by the default: see `ToolSamples`."""
    times = samples.try_get_trusted(tool, min_samples)
    if times is None:
        return get_default_ttl_s(queue_delay_s + reload_s)
    return get_best_ttl_s(times.get_sorted(), queue_delay_s * eta + reload_s)


def get_default_ttl_s(benefit_s: float) -> float:
    """τ* for an unknown tool: as if its times were exponential with mean 1 s.

    (1 − e^−τ)·B − τ is largest where B·e^−τ = 1, so at ln B; at 0 where B ≤ 1 s.
    """
    return math.log(benefit_s) if benefit_s > 1 else 0.0


def get_best_ttl_s(sorted_s: Sequence[float], benefit_s: float) -> float:
    """τ* over samples in ascending order; the shortest of equally good ones, 0 if none is worth its cost.

    Exact, and below O(n): the last samples of all chunks give a gain to beat, and a chunk is looked into
    only if its last sample's share at its first sample's cost would beat that.
    """
    if not sorted_s:
        return 0.0
    gain_per_sample = benefit_s / len(sorted_s)
    # What takes as long as it could gain is worth nothing.
    num = bisect_left(sorted_s, benefit_s)
    if num == 0:
        return 0.0
    ends = [min(first + _CHUNK, num) for first in range(0, num, _CHUNK)]
    to_beat = max(end * gain_per_sample - sorted_s[end - 1] for end in ends)
    best_s, best_gain = 0.0, 0.0
    for first, end in zip(range(0, num, _CHUNK), ends, strict=True):
        bound = end * gain_per_sample - sorted_s[first]
        if bound < to_beat or bound <= best_gain:
            continue
        for rank, sample_s in enumerate(sorted_s[first:end], first + 1):
            gain = rank * gain_per_sample - sample_s
            if gain > best_gain:
                best_s, best_gain = sample_s, gain
    return best_s
