"""How long engine steps take, learned from the steps themselves.

    step without prefill:    fixed + decode_s · requests
    step with prefill:       fixed + token_s · prefill tokens + decode_s · requests

Decoding is memory-bound and prefill is compute-bound, so each of the two kinds of steps has its own fit. A
third fit is for the time that prefill adds to a step with the same number of decodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tenuto.core.turn_work import FADE, MIN_WEIGHT, PRIOR_CASES
from tenuto.core.types import EngineView

MIN_STEP_TOKENS = 512
"""On most GPUs, such as an H100, smaller steps compute prompts much more slowly."""
MIN_PREFILL_TOKENS = 64
"""Fewer prefill tokens add no time to a step that decodes."""
ADDED_DECAY = 0.99
"""What is left of a step's weight after the next one, in the fit of the time that prefill adds: contexts
change with each prompt, so it is of some hundred steps."""


@dataclass(slots=True, eq=False)
class _Moments:
    """Decaying sums for a least-squares line through (tokens, seconds)."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, x: float, ys: Iterable[float]) -> None:
        """Add steps with x tokens that took these seconds."""
        weight, sum_x, sum_y, sum_xx, sum_xy = self.weight, self.x, self.y, self.xx, self.xy
        square = x * x
        for y in ys:
            weight = weight * FADE + 1.0
            sum_x = sum_x * FADE + x
            sum_y = sum_y * FADE + y
            sum_xx = sum_xx * FADE + square
            sum_xy = sum_xy * FADE + x * y
        self.weight, self.x, self.y, self.xx, self.xy = weight, sum_x, sum_y, sum_xx, sum_xy

    def try_get_line(self) -> tuple[float, float] | None:
        """Intercept and slope, neither negative. None if all x are nearly equal."""
        spread = self.weight * self.xx - self.x * self.x
        if not spread > 1e-6 * self.weight * self.xx:
            return None
        slope = max(0.0, (self.weight * self.xy - self.x * self.y) / spread)
        intercept = (self.y - slope * self.x) / self.weight
        return (intercept, slope) if intercept >= 0 else (0.0, self.xy / self.xx)


@dataclass(slots=True, eq=False)
class _Added:
    """The time that prefill adds to a step: a line over its tokens, fitted to about the last hundred steps.

    Steps smaller than half of `MIN_STEP_TOKENS` are left out: they lie above the line of larger ones. Steps
    that differ by less say little about its slope.

    The slope comes from the *differences* between consecutive steps with equally many requests. Their
    contexts are nearly equal, so contexts do not distort the slope. (They would where a prompt ends and
    another begins.) The line goes through the mean of the steps. Until two steps differ, computing both
    together is assumed to save half of the decoding time. This guess counts as two steps that differ by
    `MIN_STEP_TOKENS`.
    """

    weight: float = 0.0
    tokens: float = 0.0
    added_s: float = 0.0
    decode_s: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    last: tuple[float, float, int] | None = None

    def observe(self, num_tokens: float, added_s: float, decode_s: float, num_requests: int) -> None:
        if num_tokens < MIN_STEP_TOKENS // 2:
            self.last = None
            return
        self.weight = ADDED_DECAY * self.weight + 1
        self.tokens = ADDED_DECAY * self.tokens + num_tokens
        self.added_s = ADDED_DECAY * self.added_s + added_s
        self.decode_s = ADDED_DECAY * self.decode_s + decode_s
        if self.last is not None and self.last[2] == num_requests:
            x, y = num_tokens - self.last[0], added_s - self.last[1]
            if abs(x) >= MIN_STEP_TOKENS // 2:
                self.xx = (1 - MIN_WEIGHT) * self.xx + x * x
                self.xy = (1 - MIN_WEIGHT) * self.xy + x * y
        self.last = (num_tokens, added_s, num_requests)

    def get_line(self) -> tuple[float, float]:
        """Intercept and slope. The intercept has either sign.

        It may be more than a pass over the weights for decoding: prompts use more experts of a mixture.
        """
        mean_tokens, mean_s = self.tokens / self.weight, self.added_s / self.weight
        guess = (mean_s + self.decode_s / self.weight / 2) / mean_tokens
        prior_xx = 2.0 * MIN_STEP_TOKENS**2
        slope = max(0.0, (self.xy + prior_xx * guess) / (self.xx + prior_xx))
        return mean_s - slope * mean_tokens, slope


@dataclass(eq=False)
class StepTimes:
    """Fits over the latest steps. O(1) per step."""

    _decode: _Moments = field(default_factory=_Moments)
    _prefill: _Moments = field(default_factory=_Moments)
    _added: _Added = field(default_factory=_Added)
    _token_s: float | None = field(default=None, repr=False)
    """Seconds per prefill token; None if a step with prefill was observed since."""
    _full_share: float = 0.0

    def observe(
        self, num_tokens: int, num_requests: int, duration_s: float, *, is_full: bool = False
    ) -> None:
        """Count one step: its tokens, and its requests (each counts as one that decodes).

        `is_full`: it had no room for more prompt tokens.
        """
        self._full_share += MIN_WEIGHT * (is_full - self._full_share)
        if duration_s <= 0 or num_requests < 1:
            return
        num_prefill_tokens = num_tokens - num_requests
        if num_prefill_tokens < MIN_PREFILL_TOKENS:
            self._decode.observe(num_requests, [duration_s])
        else:
            self._token_s = None
            self._prefill.observe(num_tokens, [duration_s])
            decode_s = self.get_decode_s(num_requests)
            self._added.observe(num_prefill_tokens, duration_s - decode_s, decode_s, num_requests)

    def observe_decodes(
        self, durations_s: Sequence[float], num_requests: int, *, is_full: bool = False
    ) -> None:
        """The same as observing each of these steps, which have one token for each request."""
        full_share = self._full_share
        if full_share or is_full:
            for _ in durations_s:
                full_share += MIN_WEIGHT * (is_full - full_share)
            self._full_share = full_share
        known_s = durations_s if min(durations_s) > 0 else [each_s for each_s in durations_s if each_s > 0]
        self._decode.observe(num_requests, known_s)

    def get_token_s(self) -> float:
        """Seconds that one more prefill token takes; 0 before any was seen.

        Computed at most once per step, because many turns end with one step.
        """
        if self._token_s is None:
            fit = self._prefill
            _, self._token_s = fit.try_get_line() or (0.0, 0.0)
            if self._token_s * fit.x <= 1e-6 * fit.y and fit.x:
                # Steps of all sizes take as long, or the sizes are equal: the mean time of a token.
                self._token_s = fit.y / fit.x
        return self._token_s

    def get_decode_line(self) -> tuple[float, float]:
        """Seconds of a step that only decodes: of any, and of each request more. (0, 0) before any was seen.

        The first is one pass over the weights, and host time.
        """
        fit = self._decode
        # No line while all steps decode for equally many: most of their time is the pass over the weights.
        return fit.try_get_line() or (fit.y / fit.weight if fit.weight else 0.0, 0.0)

    def get_decode_s(self, num_requests: float) -> float:
        """Seconds of a step that decodes for this many requests; 0 before any was seen."""
        pass_s, request_s = self.get_decode_line()
        return pass_s + request_s * num_requests

    def get_worth_s(self, view: EngineView) -> float:
        """Seconds for which idle KV is worth its memory; infinite while no turn runs.

        In that time, turns that decode in this memory instead gain as much as it costs to restore the KV.
        One more of them gains because all share the pass over the weights. In steps full of prompts that is
        nothing. Only a turn that needs memory takes it. So it does not matter whether one waits already.
        """
        num_running_blocks = view.num_blocks - view.num_free_blocks - view.num_leased_blocks
        pass_s, request_s = self.get_decode_line()
        shared_s = (1 - self._full_share) * pass_s
        if not (num_running_blocks > 0 and shared_s > 0):
            return math.inf
        gain = shared_s / (pass_s + request_s * view.num_running)
        restore_s = self.get_token_s() * view.block_size
        for tier in view.tiers:
            restore_s = min(restore_s, tier.s_per_block)
        return restore_s * num_running_blocks / gain

    def get_added(self) -> tuple[float, float]:
        """The time that prefill adds to a step that decodes: intercept in seconds, and seconds per token.

        The intercept is negative where computing both together saves time, and positive where a mixed step
        has a cost of its own. (0, 0) before any prefill was seen.
        """
        return self._added.get_line() if self._added.weight > PRIOR_CASES else (0.0, self.get_token_s())
