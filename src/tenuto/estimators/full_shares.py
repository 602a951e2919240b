"""How often there is enough to compute for a step of a given size, whatever size steps have now.

The share of steps that are full says little of other sizes: a prompt of 700 tokens fills a step of 512, and
none of 1,024. So the tokens are counted that arrived and are not computed yet. A step that is not full leaves
none of them: what still waits then waits for memory, or has left.
"""

from __future__ import annotations

from collections.abc import Sequence

DECAY = 0.02
"""Weight of the latest step in the moving averages."""


class FullShares:
    """The share of the latest steps that each of some sizes would have filled; O(sizes) a step."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: tokens of a step, from the smallest to the largest."""
        self.full_share = 0.0
        """The share of steps that were full, at the size that they had."""
        self._shares = dict.fromkeys(sizes, 0.0)
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
        self.full_share += DECAY * (is_full - self.full_share)
        num_ready = num_tokens + (num_left if is_full else 0)
        for size, share in self._shares.items():
            self._shares[size] = share + DECAY * ((num_ready >= size) - share)

    def get(self, size: int) -> float:
        """The share of steps that would be full at this size: of the largest known size up to it, else 1."""
        return next((share for each, share in reversed(self._shares.items()) if each <= size), 1.0)

    def __repr__(self) -> str:
        return f"FullShares({self.full_share!r}, {self._shares!r}, {self._num_left!r}, {self._num_new!r})"
