"""How long engine steps take, learned from the steps themselves.

    step without prefill:    fixed + decode_s · requests
    step with prefill:       fixed + token_s · prefill tokens + decode_s · requests

Memory-bound decoding and compute-bound prefill share a step, so each kind of step has its own fit. A third
fit is of the time that prefill adds to a step with the same number of decodes. Its intercept is below zero,
because prefill costs nothing extra until it takes longer than the pass over the weights.
"""

from __future__ import annotations

DECAY = 0.998
"""Factor on a step's weight for each later step: a memory of about 500 steps."""
MIN_PREFILL_TOKENS = 64
"""With fewer prefill tokens, prefill adds no time to a step that decodes."""
MIN_STEPS = 5
"""Number of steps of a kind from which other estimates use its fit."""


class _Moments:
    """Decaying sums for a least-squares line through (tokens, seconds)."""

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def observe(self, x: float, y: float) -> None:
        self.weight = self.weight * DECAY + 1.0
        self.x = self.x * DECAY + x
        self.y = self.y * DECAY + y
        self.xx = self.xx * DECAY + x * x
        self.xy = self.xy * DECAY + x * y

    def get_line(self) -> tuple[float, float]:
        """Intercept and slope, neither negative; a line through the origin where all x are alike."""
        line = self.try_get_line()
        if line is None:
            return 0.0, self.y / self.x if self.x else 0.0
        return line if line[0] >= 0 else (0.0, self.xy / self.xx)

    def try_get_line(self) -> tuple[float, float] | None:
        """Intercept, which may be negative, and slope, which may not; None where all x are alike."""
        spread = self.weight * self.xx - self.x * self.x
        if spread <= 1e-6 * self.weight * self.xx:
            return None
        slope = max(0.0, (self.weight * self.xy - self.x * self.y) / spread)
        return (self.y - slope * self.x) / self.weight, slope

    def __repr__(self) -> str:
        return f"({self.weight!r}, {self.x!r}, {self.y!r}, {self.xx!r}, {self.xy!r})"


class StepTimes:
    """Fits over the latest steps; O(1) each."""

    def __init__(self) -> None:
        self._decode = _Moments()
        self._prefill = _Moments()
        self._added = _Moments()

    def observe(self, num_tokens: int, num_requests: int, duration_s: float) -> None:
        """Count one step: its tokens, and its requests (each counts as one that decodes)."""
        if duration_s <= 0 or num_requests < 1:
            return
        num_prefill_tokens = num_tokens - num_requests
        if num_prefill_tokens < MIN_PREFILL_TOKENS:
            self._decode.observe(num_requests, duration_s)
        else:
            self._prefill.observe(num_tokens, duration_s)
            if self._decode.weight > MIN_STEPS:
                self._added.observe(num_prefill_tokens, duration_s - self.get_decode_s(num_requests))

    def get_token_s(self) -> float:
        """Seconds that one more prefill token takes; 0 before any was seen."""
        return self._prefill.get_line()[1]

    def get_decode_s(self, num_requests: int) -> float:
        """Seconds of a step that decodes for so many requests; 0 before any was seen."""
        fixed, slope = self._decode.get_line()
        return fixed + slope * num_requests

    def get_pass_s(self) -> float:
        """Seconds of a step that do not depend on its requests: one pass over the weights, and host time."""
        return self._decode.get_line()[0]

    def get_ride(self) -> tuple[float, float]:
        """Seconds that a prefill token adds to a step, and seconds of prefill that add no time to it.

        The latter is what a step with much prefill takes less than its tokens and its decoding would one
        after the other: a whole pass at best, nothing where kernels gain nothing from being fed together.
        """
        line = self._added.try_get_line() if self._added.weight > MIN_STEPS else None
        if line is None:
            return self.get_token_s(), self.get_pass_s()
        return line[1] or self.get_token_s(), max(0.0, -line[0])

    def get_tokens_per_decode(self) -> float:
        """Prefill tokens that take as long as one more decoding request adds to a step; 1 to 50."""
        token_s, decode_s = self.get_token_s(), self._decode.get_line()[1]
        return min(50.0, max(1.0, decode_s / token_s)) if token_s > 0 else 10.0

    def __repr__(self) -> str:
        return f"StepTimes({self._decode!r}, {self._prefill!r}, {self._added!r})"
