"""How predictable the lengths of jobs are: Continuum's η (arXiv 2511.02230)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

MAX_JOBS = 1000
"""Finished jobs remembered."""
MAX_TURNS = 100_000
"""A job counted as longer than this is counted as this long."""


class JobLengths:
    """Numbers of turns of the last finished jobs.

    η = −Corr(k, N − k) over all turns k = 1 … N of these jobs: 1 where all jobs are equally long (each turn
    served brings the end nearer), 0 where jobs are memoryless (turns served say nothing about the rest).
    """

    def __init__(self, num_turns: Iterable[int] = (), max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._lengths: deque[int] = deque()
        # Sums over the turns of all jobs: 1, k, N − k, k², (N − k)², k·(N − k); exact, being integers.
        self._sums = [0] * 6
        for length in num_turns:
            self.observe(length)

    def __len__(self) -> int:
        return len(self._lengths)

    def observe(self, num_turns: int) -> None:
        """Count one finished job. O(1)."""
        if num_turns < 1:
            raise ValueError(f"a finished job has a turn at least, got {num_turns!r}")
        num_turns = min(int(num_turns), MAX_TURNS)
        if len(self._lengths) == self._max_jobs:
            self._add(self._lengths.popleft(), -1)
        self._lengths.append(num_turns)
        self._add(num_turns, +1)

    def get_eta(self, default: float = 1.0) -> float:
        """η, at least 0; `default` while it is undefined, as no finished job had two turns.

        Where long jobs tend to get longer the correlation is positive: turns served then promise no end,
        and 0 stands for that too.
        """
        num, sum_k, sum_r, sum_kk, sum_rr, sum_kr = self._sums
        variances = (num * sum_kk - sum_k * sum_k) * (num * sum_rr - sum_r * sum_r)
        if variances == 0:
            return default
        return max(0.0, (sum_k * sum_r - num * sum_kr) / math.sqrt(variances))

    def get_state(self) -> list[int]:
        """The lengths, oldest first, as JSON can hold them; the constructor takes them back."""
        return list(self._lengths)

    def _add(self, n: int, sign: int) -> None:
        sum_k, sum_r = n * (n + 1) // 2, n * (n - 1) // 2
        sum_kk, sum_rr = n * (n + 1) * (2 * n + 1) // 6, (n - 1) * n * (2 * n - 1) // 6
        added = (n, sum_k, sum_r, sum_kk, sum_rr, n * sum_k - sum_kk)
        self._sums = [total + sign * more for total, more in zip(self._sums, added, strict=True)]

    def __repr__(self) -> str:
        return f"JobLengths({list(self._lengths)})"
