"""Goodput: how many turns a second keep the limits on their times. As `vllm bench serve --goodput` counts it.

The limits are on turns, which are the requests of other tools. A limit on jobs is `tenuto plan --p95`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tenuto.core.errors import ConfigError
from tenuto.core.messages import suggest
from tenuto.records.schema import Goodput, TurnRecord

LIMITS: Mapping[str, str] = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "latency_s"}
"""The name of each limit, and the time of a turn that it bounds."""


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds by name, from texts such as `ttft:500`. Raises ConfigError."""
    limits_ms: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in LIMITS:
            known = ", ".join(LIMITS)
            raise ConfigError(
                f"--goodput wants NAME:MILLISECONDS, for example ttft:500; the names are {known}; "
                f"got {text!r}{suggest(name, LIMITS)}"
            )
        try:
            limits_ms[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {name} wants a number of milliseconds, got {value!r}") from None
        if not 0 <= limits_ms[name] < math.inf:
            raise ConfigError(f"--goodput {name} must be 0 ms or more and finite, got {value}")
    return limits_ms


def measure_goodput(
    turns: Iterable[TurnRecord], limits_ms: Mapping[str, float], makespan_s: float | None
) -> Goodput | None:
    """Count the turns that keep all limits; None without limits. Turns without an answer keep none."""
    if not limits_ms:
        return None
    known = list(turns)
    good = sum(_is_good(turn, limits_ms) for turn in known)
    return Goodput(
        limits_ms=dict(limits_ms),
        turns=good,
        share=good / len(known) if known else None,
        turns_per_s=good / makespan_s if makespan_s else None,
    )


def _is_good(turn: TurnRecord, limits_ms: Mapping[str, float]) -> bool:
    if turn.status != "ok":
        return False
    for name, limit_ms in limits_ms.items():
        seconds = getattr(turn, LIMITS[name])
        if seconds is None and name == "tpot":
            seconds = 0.0  # an answer of one token has no time between tokens
        if seconds is None or seconds * 1000 > limit_ms:
            return False
    return True
