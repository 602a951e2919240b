"""Counters of the server for `/metrics`. Times are simulated seconds, except `lag_s`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tenuto.core.stats import Histogram

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def _histogram(bounds: tuple[float, ...]) -> Callable[[], Histogram]:
    return lambda: Histogram(bounds)


@dataclass
class EngineStats:
    """Totals since the start."""

    num_prompt_tokens: int = 0
    """Prompt tokens of turns that have produced their first token."""
    num_output_tokens: int = 0
    num_queried_tokens: int = 0
    """Prompt tokens of requests that started, counted at their first start."""
    num_hit_tokens: int = 0
    """The part of `num_queried_tokens` that was found in the KV cache."""
    num_preemptions: int = 0
    num_finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    first_token_s: Histogram = field(default_factory=_histogram(_FIRST_TOKEN_S))
    between_tokens_s: Histogram = field(default_factory=_histogram(_PER_TOKEN_S))
    per_token_s: Histogram = field(default_factory=_histogram(_PER_TOKEN_S))
    """The mean time between a request's tokens, one value per request."""
    latency_s: Histogram = field(default_factory=_histogram(_REQUEST_S))
    queue_s: Histogram = field(default_factory=_histogram(_REQUEST_S))
    inference_s: Histogram = field(default_factory=_histogram(_REQUEST_S))
    prefill_s: Histogram = field(default_factory=_histogram(_REQUEST_S))
    decode_s: Histogram = field(default_factory=_histogram(_REQUEST_S))
    prompt_tokens: Histogram = field(default_factory=_histogram(_TOKENS))
    output_tokens: Histogram = field(default_factory=_histogram(_TOKENS))
    step_tokens: Histogram = field(default_factory=_histogram(_STEP_TOKENS))
    lag_s: Histogram = field(default_factory=_histogram(_LAG_S))
    """Real seconds by which a step ended later than it should have."""
