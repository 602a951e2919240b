"""What a turn costs the engine, in prefill tokens, and the moving means that guess what is not known yet."""

from __future__ import annotations

DECODE_TOKENS = 8.0
"""Prefill tokens that cost as much as one decoded token. `tenuto.sim.cost` gives 5 to 15 on GPUs. Work is
compared with work only, so it need not be exact."""
MIN_WEIGHT = 0.05
"""Smallest weight of the latest value in a moving mean; the first values weigh more."""


class MovingMean:
    """The mean of the latest values; 0 before the first."""

    __slots__ = ("num_values", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_values = 0

    def observe(self, value: float) -> None:
        """Take in one more value."""
        self.num_values += 1
        self.value += max(MIN_WEIGHT, 1 / self.num_values) * (value - self.value)


def get_work(num_prompt_tokens: int, num_hit_tokens: int, num_output_tokens: float) -> float:
    """The work of a turn, at least 1: the prompt tokens that it computes, and its output."""
    work = num_prompt_tokens - num_hit_tokens + DECODE_TOKENS * num_output_tokens
    return work if work > 1.0 else 1.0
