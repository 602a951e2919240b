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
