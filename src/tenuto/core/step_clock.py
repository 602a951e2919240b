"""Computed steps, as a policy is told of them."""

from __future__ import annotations

import math

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
        num_tokens: int,
        num_requests: int,
        *,
        is_full: bool,
    ) -> StepView:
        """The view of a step that just ended.

        `num_tokens` is without drafts: a request that decodes has one token however many are guessed behind
        it, and the rest of a step's tokens is its prefill.
        """
        duration_s = now_s - max(self._ended_s, scheduled_s)
        self._ended_s = now_s
        return StepView(now_s, duration_s, num_tokens, num_requests, is_full)
