"""Random turns, aborts, pressure, resets, late and failed copies: no wrong token, nothing left, no stall."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from tests.vllm.tier_chaos import run_chaos

POLICIES = ("tenuto", "stock", "infercept", "break-even")


@pytest.mark.parametrize("seed", range(4))
def test_random_events_leave_no_trace(seed: int) -> None:
    counts = run_chaos(random.Random(seed), num_events=400, policy=POLICIES[seed], depth=1 + seed % 2)
    assert counts["finished"] > 5
    assert counts["checked"] > 50


@pytest.mark.parametrize(
    ("seed", "connectors"), list(enumerate([("other",), ("other", "ours"), ("ours", "other"), ("other",)]))
)
def test_beside_another_s_connector(seed: int, connectors: tuple[str, ...]) -> None:
    """Leases and loads of both do not take each other's blocks, and what the other loads counts as a hit."""
    rng = random.Random(seed)
    counts = run_chaos(rng, num_events=400, policy=POLICIES[seed], depth=1 + seed % 2, connectors=connectors)
    assert counts["finished"] > 5
    assert counts["loaded by the other"] > 0
    assert counts["host hits"] > 0
