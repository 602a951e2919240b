"""Computed steps, as a policy is told of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tenuto.core.types import StepView


class StepClock:
    """Makes a `StepView` of each step that ended. Steps end in the order in which they were scheduled."""

    def __init__(self, ended_s: float = -math.inf) -> None:
        """`ended_s`: no step ran before this time."""
        self._ended_s = ended_s

    def finish(
        self,
        now_s: float,
        scheduled_s: float,
        num_tokens: Iterable[int],
        num_drafts: Iterable[int],
        *,
        is_full: bool,
    ) -> StepView:
        """The view of a step that just ended: tokens per request, and how many of them were drafts.

        Drafts are left out: a request that decodes has one token however many are guessed behind it, and
        the rest of a step's tokens is its prefill.
        """
        counts = list(num_tokens)
        duration_s = now_s - max(self._ended_s, scheduled_s)
        self._ended_s = now_s
        return StepView(now_s, duration_s, sum(counts) - sum(num_drafts), len(counts), is_full)
