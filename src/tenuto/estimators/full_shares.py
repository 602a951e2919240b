"""How often there is enough to compute for a step of a given size, whatever size steps have now.

The share of steps that are full says little of other sizes: a prompt of 700 tokens fills a step of 512, and
none of 1,024. So the tokens are counted that arrived and are not computed yet. A step that is not full leaves
none of them: what still waits then waits for memory, or has left.

Steps come far more often than questions. So no share is made smaller at each step: a step weighs more than
the one before it, and counts once, for the largest size that it fills.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

DECAY = 0.02
"""Weight of the latest step in the moving averages."""
MAX_WEIGHT = 1e9
"""Before a step weighs more, all weights are made smaller: once in a thousand steps."""


class FullShares:
    """The share of the latest steps that each of some sizes would have filled; O(log sizes) a step."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: tokens of a step, from the smallest to the largest."""
        self._sizes = tuple(sizes)
        self._weight = 1.0
        """Of the latest step."""
        self._full = 0.0
        """The weight of the steps that were full, at the size that they had."""
        self._filled = [0.0] * (len(self._sizes) + 1)
        """The weight of the steps by how many of the sizes they fill."""
        self._num_left = 0
        """Prompt tokens that are still to compute."""
        self._num_new = 0
        """Of these, those that arrived since the latest step."""

    def observe_arrival(self, num_new_tokens: int) -> None:
        """A turn arrived, with so many tokens to compute."""
        self._num_left += num_new_tokens
        self._num_new += num_new_tokens

    def observe_step(self, num_tokens: int, num_requests: int, *, is_full: bool) -> None:
        """Count one step: its tokens, and its requests (each counts as one that decodes)."""
        num_left = max(0, self._num_left - max(0, num_tokens - num_requests))
        self._num_left = num_left if is_full else min(num_left, self._num_new)
        self._num_new = 0
        self._weight /= 1 - DECAY
        if self._weight > MAX_WEIGHT:
            self._full /= self._weight
            self._filled = [each / self._weight for each in self._filled]
            self._weight = 1.0
        if is_full:
            self._full += self._weight
            num_tokens += num_left
        self._filled[bisect_right(self._sizes, num_tokens)] += self._weight

    @property
    def full_share(self) -> float:
        """The share of steps that were full, at the size that they had."""
        return DECAY * self._full / self._weight

    def get(self, size: int) -> float:
        """The share of steps that would be full at this size: of the largest known size up to it, else 1."""
        num_sizes = bisect_right(self._sizes, size)
        return DECAY * sum(self._filled[num_sizes:]) / self._weight if num_sizes else 1.0

    def __repr__(self) -> str:
        sums = (self._weight, self._full, self._filled)
        return f"FullShares({sums!r}, {self._num_left!r}, {self._num_new!r})"
